"""What a step keeps of the vocabulary: no float32 copy of logits that nobody asked to be drawn."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.logprobs import POSITIONS_AT_ONCE
from engine.request import AcceptanceRule, SamplingParams
from tests.engine.driver import GREEDY, request, run, tiny_engine
from tests.tiny import VOCAB_SIZE, tiny_llama

PROMPT = [5, 6, 7, 8] * 40


class WideFloats(TorchDispatchMode):
    """The most positions that a float32 tensor [..., V] had."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype == torch.float32
                and tensor.dim() > 1
                and tensor.shape[-1] == VOCAB_SIZE
            ):
                self.most = max(self.most, tensor.numel() // VOCAB_SIZE)
        return result


def widest(sampling: SamplingParams, num_rows: int = 4, num_sampled: int | None = None) -> int:
    """Among rows of which num_sampled ask for `sampling` and the others are greedy."""
    target = tiny_llama(dtype=torch.bfloat16)
    engine = tiny_engine(target=target, drafters=("draft_model",), max_num_rows=num_rows)
    asked = [
        request(
            str(n),
            PROMPT,
            max_tokens=12,
            ignore_eos=True,
            max_draft_tokens=4,
            sampling=sampling if n < (num_rows if num_sampled is None else num_sampled) else GREEDY,
        )
        for n in range(num_rows)
    ]
    with WideFloats() as seen:
        outcome = run(engine, asked)
    assert sum(stats.num_draft_tokens for stats in outcome.stats.values()) > 0
    return seen.most


def test_greedy_rows_have_none() -> None:
    assert widest(GREEDY) == 0


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_sampled_rows_have_those_of_the_positions_that_are_drawn(rule: AcceptanceRule) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=3, acceptance_rule=rule)
    assert 0 < widest(sampling) <= 4 * 5
    assert 0 < widest(sampling, num_sampled=1) <= 5


def test_logprobs_of_a_long_prompt_are_computed_some_at_a_time() -> None:
    assert len(PROMPT) > 2 * POSITIONS_AT_ONCE
    sampling = SamplingParams(temperature=0, num_top_logprobs=2, prompt_logprobs=True)
    assert 5 < widest(sampling) <= POSITIONS_AT_ONCE
