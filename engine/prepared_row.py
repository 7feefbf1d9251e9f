"""A planned row on its way through verification: what the target computes for it, and what came
of it."""

from dataclasses import dataclass

from engine.drafter.base import Proposal
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest
from engine.request import TokenLogprob
from engine.sampler import RowSampling
from engine.scheduler import PlannedRow


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What a step found for one row; nothing is committed yet.

    token_ids are the accepted drafts and the recovered or bonus token; empty when the row did
    not reach its newest token. error says why the row cannot go on.
    """

    planned: PlannedRow
    num_drafts: int
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A planned row with all that its verification needs; sampling is None if it emits nothing."""

    planned: PlannedRow
    proposal: Proposal
    forward: ForwardRow
    sampling: RowSampling | None


def prepare(planned: PlannedRow, proposal: Proposal) -> PreparedRow | RowOutcome:
    """A grammar that became too complex ends its request here, before the forward."""
    live = planned.live
    assert live.row is not None  # noqa: S101 - for the type checker; planned rows have one
    token_ids = live.token_ids[planned.start : planned.start + planned.num_tokens]
    sampling = None
    if planned.emits:
        try:
            sampling = _row_sampling(live, proposal)
        except RuntimeError as error:
            return RowOutcome(planned, 0, error=str(error))
    num_logits = sampling.num_positions if sampling is not None else 0
    if live.num_missing_prompt_logprobs:
        num_logits = planned.num_tokens
    forward = ForwardRow(live.row, [*token_ids, *proposal.token_ids], planned.start, num_logits)
    return PreparedRow(planned, proposal, forward, sampling)


def _row_sampling(live: LiveRequest, proposal: Proposal) -> RowSampling:
    stopping = live.request.stopping
    num_positions = len(proposal.token_ids) + 1
    return RowSampling(
        params=live.request.sampling,
        num_positions=num_positions,
        first_position=live.num_tokens,
        draft_token_ids=proposal.token_ids,
        history=live.history,
        num_guarded_positions=max(
            0, min(num_positions, stopping.min_tokens - live.num_output_tokens)
        ),
        guarded_token_ids=live.guarded_token_ids,
        allowed=live.grammar.masks(proposal.token_ids) if live.grammar is not None else None,
    )
