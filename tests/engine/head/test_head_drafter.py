"""The head inside the engine drafts what the head computes over the whole conversation."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, HeadSource, SpeculationConfig
from engine.drafter.base import DraftJob, Proposal
from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.model import Eagle3Head
from engine.engine import Engine
from engine.loader import describe_model
from engine.request import SamplingParams
from engine.training.capture import Capturer
from engine.training.unrolled import make_batch, unroll
from tests.engine.driver import request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.marks import thorough
from tests.tiny import tiny_tokenizer

PROMPTS = ([5, 9, 17, 30, 8], [40, 41, 42], [100, 7, 7, 100, 12, 60, 61, 33, 2, 9], [77] * 4)
Heard = list[tuple[str, int, Proposal]]


def head_engine(
    tmp_path: Path, head: Eagle3Head | None = None, *, more: Sequence[str] = (), **options: object
) -> Engine:
    target = deep_tiny_llama()
    folder = save_tiny_head(tmp_path / "head", head or tiny_head(deep_tiny_llama()))
    config = EngineConfig(
        target="tiny",
        kv_cache_memory=5e8,
        speculation=SpeculationConfig(
            drafters=("head",),
            head=str(folder),
            more_heads=tuple(HeadSource(name, str(folder)) for name in more),
            max_draft_tokens=options.pop("max_draft_tokens", 3),  # type: ignore[arg-type]
        ),
        **options,  # type: ignore[arg-type]
    )
    return Engine.from_models(config, describe_model("tiny", target, tiny_tokenizer()))


def listen(engine: Engine) -> Heard:
    """(request id, tokens at that time, proposal) of everything that is proposed."""
    heard: Heard = []
    propose: Callable[[Sequence[DraftJob]], list[Proposal]] = engine._drafters.propose

    def listening(jobs: Sequence[DraftJob]) -> list[Proposal]:
        found = propose(jobs)
        for job, proposal in zip(jobs, found, strict=True):
            if proposal.token_ids:
                heard.append((job.live.request_id, job.live.num_tokens, proposal))
        return found

    engine._drafters.propose = listening  # type: ignore[method-assign]
    return heard


def offline_drafts(head: Eagle3Head, token_ids: list[int], num_prompt: int) -> list[list[int]]:
    """Draft k of a round that begins when the first num_prompt + i tokens are known, by i."""
    capturer = Capturer(deep_tiny_llama(), head.config.captured_layers)
    batch = make_batch(capturer.capture([(token_ids, num_prompt)]))
    outputs = unroll(head, batch, 3)
    capturer.close()
    ids = head.draft_token_ids
    per_step = [ids[head.lm_head(output)[0].argmax(-1)].tolist() for output in outputs]
    return [list(drafts) for drafts in zip(*per_step, strict=True)]


@pytest.mark.parametrize("num_rows", [thorough(1), 2, thorough(4)])
@pytest.mark.parametrize("block_size", [None, 8])
def test_drafts_are_those_of_the_head_over_the_whole_conversation(
    tmp_path: Path, num_rows: int, block_size: int | None
) -> None:
    head = tiny_head(deep_tiny_llama())
    engine = head_engine(tmp_path, head, max_num_rows=num_rows, kv_block_size=block_size)
    heard = listen(engine)
    outcome = run(engine, [request(str(i), p, max_tokens=20) for i, p in enumerate(PROMPTS)])
    compared = 0
    for request_id, num_tokens, proposal in heard:
        prompt = PROMPTS[int(request_id)]
        text = [*prompt, *outcome.token_ids[request_id]]
        drafts = offline_drafts(head, text, len(prompt))
        # A round at n tokens starts from the pair (token n - 1, states of token n - 2).
        index = num_tokens - len(prompt) - 1
        if index >= len(drafts):
            continue
        for step, token_id in enumerate(proposal.token_ids):
            assert token_id == drafts[index][step]
            compared += 1
            position = num_tokens + step
            if position >= len(text) or text[position] != token_id:
                break  # further drafts went another way than the text
    assert compared > 60


def test_output_is_the_targets_own_whatever_the_head_drafts(tmp_path: Path) -> None:
    plain = tiny_engine(target=deep_tiny_llama(), drafters=())
    engine = head_engine(tmp_path)
    for sampling in (SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=5)):
        asked = [
            request(f"{sampling.seed}-{i}", p, max_tokens=24, sampling=sampling)
            for i, p in enumerate(PROMPTS)
        ]
        assert run(engine, asked).token_ids == run(plain, asked).token_ids
    engine.check_integrity()


def test_rounds_without_drafting_lose_no_context(tmp_path: Path) -> None:
    """A row that drafts again after a pause drafts what it would have drafted without it."""
    head = tiny_head(deep_tiny_llama())
    engine = head_engine(tmp_path, head, max_num_rows=1)
    heard = listen(engine)
    lengths = engine._lengths.choose
    engine._lengths.choose = (  # type: ignore[method-assign]
        lambda rows, others=0: {
            key: value if rows[0].num_tokens % 7 > 3 else 0
            for key, value in lengths(rows, others).items()
        }
    )
    outcome = run(engine, [request("0", PROMPTS[0], max_tokens=40)])
    text = [*PROMPTS[0], *outcome.token_ids["0"]]
    drafts = offline_drafts(head, text, len(PROMPTS[0]))
    first = [(n, p.token_ids[0]) for _, n, p in heard if n - len(PROMPTS[0]) - 1 < len(drafts)]
    assert len(first) > 5
    assert all(token == drafts[n - len(PROMPTS[0]) - 1][0] for n, token in first)


def test_a_head_named_by_a_request_drafts_for_it_alone(tmp_path: Path) -> None:
    engine = head_engine(tmp_path, more=("v2",))
    assert set(engine.info.drafters) == {"head", "head:v2"}
    asked = [
        request("a", PROMPTS[0], drafter="head:v2"),
        request("b", PROMPTS[1]),
        request("c", PROMPTS[2], mode="off"),
    ]
    outcome = run(engine, asked)
    assert outcome.stats["a"].drafter == "head:v2"
    assert outcome.stats["b"].drafter == "head"
    assert outcome.stats["c"].drafter == ""


def test_a_head_of_another_target_is_refused_by_the_fields_name(tmp_path: Path) -> None:
    head = tiny_head(deep_tiny_llama())
    save_tiny_head(tmp_path / "head", head, target_fingerprint="other")
    config = EngineConfig(
        target="tiny",
        speculation=SpeculationConfig(drafters=("head",), head=str(tmp_path / "head")),
    )
    loaded = describe_model("tiny", deep_tiny_llama(), tiny_tokenizer())
    with pytest.raises(HeadFormatError, match="target_fingerprint"):
        Engine.from_models(config, loaded)


def test_a_failing_head_is_switched_off_and_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = head_engine(tmp_path)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(Eagle3Head, "fuse", broken)
    plain = tiny_engine(target=deep_tiny_llama(), drafters=())
    asked = [request(str(i), p) for i, p in enumerate(PROMPTS)]
    assert run(engine, asked).token_ids == run(plain, asked).token_ids
    assert "planted" in engine._drafters.failures["head"]
