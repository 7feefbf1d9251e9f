"""The target answers the prompts, through our own engine with speculation on.

Prompts are answered in shards. A finished shard is never made again, an interrupted one is
made again from its start, and because the noise of a token depends on its request's seed
alone, a run that was killed gives the same rows as one that was not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.engine import Engine
from engine.request import (
    FinishReason,
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from engine.training.conversations import (
    Conversation,
    Prompt,
    shard_path,
    stable_fraction,
    write_shard,
)
from engine.training.errors import TrainingError


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How answers are drawn.

    sampled_share of the prompts, chosen by their keys, are answered at `temperature`, the
    others greedily: the mixture that a drafter meets when it serves.
    """

    max_output_tokens: int = 192
    temperature: float = 0.7
    sampled_share: float = 0.5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Accounting:
    """num_prompts = num_answered + num_failed, always."""

    num_prompts: int
    num_answered: int
    num_failed: int
    num_output_tokens: int

    def __post_init__(self) -> None:
        if self.num_prompts != self.num_answered + self.num_failed:
            raise TrainingError("data: prompts, answers and failures do not add up")


def answer_request(prompt: Prompt, plan: AnswerPlan) -> GenerationRequest:
    is_sampled = stable_fraction(prompt.key, "sampled") < plan.sampled_share
    seed = int(stable_fraction(prompt.key, f"seed-{plan.seed}") * 2**32)
    return GenerationRequest(
        prompt.key,
        prompt.token_ids,
        SamplingParams(temperature=plan.temperature if is_sampled else 0.0, seed=seed),
        StoppingParams(max_tokens=plan.max_output_tokens),
        SpeculationParams(SpeculationMode.AUTO),
    )


def run_requests(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    on_tokens: Callable[[int], None] = lambda _: None,
) -> dict[str, tuple[list[int], FinishReason]]:
    """Output tokens and finish reason by request id. on_tokens hears of each step's tokens."""
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons: dict[str, FinishReason] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        step = engine.step()
        for delta in step.deltas:
            outputs[delta.request_id].extend(delta.token_ids)
            on_tokens(len(delta.token_ids))
        for stats in step.finished:
            reasons[stats.request_id] = stats.finish_reason
    return {key: (outputs[key], reasons[key]) for key in outputs}


def regenerate_shard(
    engine: Engine,
    folder: Path,
    index: int,
    prompts: Sequence[Prompt],
    plan: AnswerPlan,
    on_tokens: Callable[[int], None] = lambda _: None,
) -> Accounting | None:
    """Answer one shard's prompts and write it; None when it is there already."""
    if shard_path(folder, index).exists():
        return None
    requests = [answer_request(prompt, plan) for prompt in prompts]
    answers = run_requests(engine, requests, on_tokens)
    rows = []
    for prompt, request in zip(prompts, requests, strict=True):
        token_ids, reason = answers[prompt.key]
        if reason is FinishReason.ERROR:
            continue
        rows.append(
            Conversation(
                prompt.key,
                prompt.source,
                prompt.token_ids,
                tuple(token_ids),
                str(reason),
                request.sampling.temperature,
                request.sampling.seed,
            )
        )
    write_shard(folder, index, rows)
    return Accounting(
        num_prompts=len(prompts),
        num_answered=len(rows),
        num_failed=len(prompts) - len(rows),
        num_output_tokens=sum(len(row.output_token_ids) for row in rows),
    )
