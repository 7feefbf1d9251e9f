"""What requests get from an engine: their tokens, and the logits of every position that emitted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.engine import Engine
from engine.layout.plan import ForwardRow
from engine.request import GenerationRequest
from tests.engine.driver import Outcome

RECORDED = {"greedy", "seeded", "long"}  # the first word of the requests that are watched


@dataclass(slots=True)
class Observed:
    """What the probed requests got: tokens, and the logits of every position that emitted."""

    outcome: Outcome = field(default_factory=Outcome)
    logits: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)
    fed: list[tuple[str, int, list[int], torch.Tensor]] = field(default_factory=list)

    def keep_what_was_committed(self, requests: Sequence[GenerationRequest]) -> None:
        """Drop the logits that followed a draft that was rejected."""
        prompts = {item.request_id: list(item.prompt_token_ids) for item in requests}
        for request_id, start, token_ids, logits in self.fed:
            prompt = prompts[request_id]
            final = prompt + self.outcome.token_ids[request_id]
            for offset in range(len(token_ids)):
                position = start + offset
                index = offset - (len(token_ids) - len(logits))
                is_committed = token_ids[: offset + 1] == final[start : position + 1]
                if is_committed and index >= 0 and len(prompt) - 1 <= position < len(final) - 1:
                    self.logits.setdefault(request_id, {})[position] = logits[index]
        self.fed.clear()


def observe(
    engine: Engine, requests: Sequence[GenerationRequest], arrivals: Sequence[int] | None = None
) -> Observed:
    """Run everything; arrivals are the steps before which the requests are submitted."""
    observed = Observed()
    runner = engine._verifier.runner
    running = engine._scheduler.running
    forward = runner.forward

    def record(rows: Sequence[ForwardRow], *args: Any, **options: Any) -> torch.Tensor:
        logits = forward(rows, *args, **options)
        ids = {live.row: request_id for request_id, live in running.items()}
        end = 0
        for row in rows:
            end += row.num_logits
            if row.num_logits and ids[row.row].split(" ")[0] in RECORDED:
                kept = logits[end - row.num_logits : end].clone()
                observed.fed.append((ids[row.row], row.start, list(row.token_ids), kept))
        return logits

    runner.forward = record  # type: ignore[method-assign]
    try:
        waiting = sorted(
            zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0]
        )
        for step in range(2000):
            while waiting and waiting[0][0] <= step:
                engine.submit(waiting.pop(0)[1])
            if not waiting and not engine.has_work():
                break
            observed.outcome.add_step(engine)
    finally:
        runner.forward = forward  # type: ignore[method-assign]
    recorded = [item for item in requests if item.request_id.split(" ")[0] in RECORDED]
    observed.keep_what_was_committed(recorded)
    return observed
