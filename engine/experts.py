"""Mixtures of experts whose tokens keep their bits in any company.

How many tokens of a forward an expert sees depends on all of them, and in float32 a product
of few tokens takes another kernel. Every expert's share is therefore filled up with zeros to
the multiple that the runner pins the whole forward to.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

_PREFIX = "tandem_experts_"
_numbers = itertools.count()


def pad_experts(model: PreTrainedModel, multiple: Callable[[], int]) -> None:
    """Let the model's experts, if it has any, see multiples of `multiple()` tokens.

    multiple is a bound method that is not kept alive; 1 leaves the experts as they are.
    """
    present = model.config.get_text_config()._experts_implementation or ""
    if present != "grouped_mm" and not present.startswith(_PREFIX):
        return
    ask = weakref.WeakMethod(multiple)

    def forward(
        experts: Any,
        hidden_states: torch.Tensor,  # [N, hidden_size]
        top_k_index: torch.Tensor,  # [N, K]
        top_k_weights: torch.Tensor,  # [N, K]
    ) -> torch.Tensor:
        method = ask()
        wanted = method() if method is not None else 1
        is_pinned = hidden_states.device.type == "cpu" and hidden_states.dtype == torch.float32
        if wanted == 1 or not is_pinned or experts._is_expert_parallel:
            result: torch.Tensor = grouped_mm_experts_forward(
                experts, hidden_states, top_k_index, top_k_weights
            )
            return result
        return _forward_padded(experts, hidden_states, top_k_index, top_k_weights, wanted)

    name = f"{_PREFIX}{next(_numbers)}"
    ALL_EXPERTS_FUNCTIONS.register(name, forward)
    model.set_experts_implementation(name)


def _forward_padded(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    multiple: int,
) -> torch.Tensor:
    num_tokens, num_choices = top_k_index.shape
    chosen = top_k_index.reshape(-1)
    num_missing = -torch.bincount(chosen, minlength=experts.num_experts) % multiple
    filling = torch.repeat_interleave(torch.arange(experts.num_experts), num_missing)
    pairs = F.pad(hidden_states.repeat_interleave(num_choices, 0), (0, 0, 0, len(filling)))
    weights = F.pad(top_k_weights.reshape(-1), (0, len(filling)))
    outputs: torch.Tensor = grouped_mm_experts_forward(
        experts, pairs, torch.cat([chosen, filling])[:, None], weights[:, None]
    )
    return outputs[: num_tokens * num_choices].view(num_tokens, num_choices, -1).sum(dim=1)
