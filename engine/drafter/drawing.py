"""How a drafter that has logits draws its next token: as the target would, wherever it can.

Under the coupled rule and greedily it uses the target's own noise, so the two agree wherever
their distributions are close. Under the rejection rule it draws with noise of its own and
hands over the distribution it drew from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.live_request import LiveRequest
from engine.noise import Stream
from engine.request import AcceptanceRule
from engine.sampler import RowSampling, Sampler


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Where a row's next draft stands: after these drafts."""

    live: LiveRequest
    draft_token_ids: Sequence[int]


def draw(
    sampler: Sampler,
    logits: torch.Tensor,  # [R, V]
    positions: Sequence[DraftPosition],
) -> tuple[list[int], list[torch.Tensor | None]]:
    """A token per row, and the distribution [V] float32 it was drawn from where a rule asks.

    Raises FloatingPointError if no row's logits are finite: then it is not a request's fault.
    """
    sampling = [_row_sampling(position) for position in positions]
    by_rejection = [draws_by_rejection(position.live) for position in positions]
    token_ids, is_sound = sampler.draw(
        logits,
        sampling,
        streams=[Stream.DRAFT if apart else Stream.TARGET for apart in by_rejection],
    )
    probs: list[torch.Tensor | None] = [None] * len(positions)
    for index, apart in enumerate(by_rejection):
        if apart:
            processed = sampler.process(logits[index : index + 1].clone(), [sampling[index]])
            probs[index] = torch.softmax(processed, dim=-1)[0]
    drawn, sound = torch.stack([token_ids, is_sound.long()]).tolist()  # one copy from the device
    if not any(sound):
        raise FloatingPointError("the drafter's logits are not finite")
    return drawn, probs


def is_plain(position: DraftPosition) -> bool:
    """Whether a bare argmax over the logits is the draw."""
    return _row_sampling(position).is_plain


def draws_by_rejection(live: LiveRequest) -> bool:
    sampling = live.request.sampling
    return not sampling.is_greedy and sampling.acceptance_rule is AcceptanceRule.REJECTION


def _row_sampling(position: DraftPosition) -> RowSampling:
    live, num_drafted = position.live, len(position.draft_token_ids)
    num_guarded = live.request.stopping.min_tokens - live.num_output_tokens - num_drafted
    return RowSampling(
        params=live.request.sampling,
        num_positions=1,
        first_position=live.num_tokens + num_drafted,
        history=live.history,
        preceding_token_ids=tuple(position.draft_token_ids),
        num_guarded_positions=int(num_guarded > 0),
        guarded_token_ids=live.guarded_token_ids,
        # Drafts that the grammar forbids would be cut before they are verified.
        allowed=live.grammar.masks(position.draft_token_ids)[-1:] if live.grammar else None,
    )
