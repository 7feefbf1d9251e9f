"""Commit: the only place where a request's tokens, its cache's length and its counters change."""

import time
from collections.abc import Callable

from engine.assembly import Parts
from engine.audit_ending import Ending
from engine.drafter.base import Proposal
from engine.live_request import LiveRequest
from engine.prepared_row import RowOutcome
from engine.request import FinishReason, TokenDelta
from engine.scheduler import PlannedRow
from engine.stats import RequestStats, RowStepStats


class Committer:
    """Turns outcomes into tokens; on_closed is called with every request that has ended."""

    def __init__(self, parts: Parts, on_closed: Callable[[LiveRequest, Ending], None]) -> None:
        self._scheduler = parts.scheduler
        self._drafters = parts.drafters
        self._lengths = parts.lengths
        self._max_model_tokens = parts.info.max_model_tokens
        self._on_closed = on_closed

    def commit(
        self, outcome: RowOutcome, proposal: Proposal
    ) -> tuple[TokenDelta | None, RequestStats | None, RowStepStats]:
        """Book what a step found for one row: its delta, its end if it ended, its statistics."""
        planned, live = outcome.planned, outcome.planned.live
        was_decoding = live.is_decoding
        self._count_computed(planned, was_decoding, outcome.num_drafts)
        if outcome.error is not None:
            delta, stats = self.finish(live, FinishReason.ERROR, outcome.error)
            return delta, stats, _row_stats(outcome, was_decoding, 0, proposal)
        emitted, reason, stop_token_id = self._cut(live, outcome.token_ids)
        text, stop_string = None, None
        watcher = live.watcher
        if watcher is not None and emitted:
            text, match = watcher.push(emitted)
            if match is not None:
                emitted, reason = emitted[: match.num_tokens], FinishReason.STOP_STRING
                stop_string, stop_token_id = match.stop_string, None
            elif reason is not None:
                text += watcher.finish()
        is_first = live.num_output_tokens == 0
        live.token_ids.extend(emitted)
        num_kept = min(outcome.num_accepted, max(0, len(emitted) - 1))
        live.num_computed_tokens = planned.start + planned.num_tokens + num_kept
        assert live.row is not None  # noqa: S101 - for the type checker; planned rows have one
        self._scheduler.cache.commit(live.row, live.token_ids, live.num_computed_tokens)
        row_stats = _row_stats(outcome, was_decoding, len(emitted), proposal)
        if not emitted:
            return None, None, row_stats
        live.count_verification(outcome.num_drafts, outcome.num_accepted, len(emitted))
        self._lengths.observe(live, outcome.num_drafts, outcome.num_accepted)
        self._drafters.observe(live, proposal.drafter, outcome.num_drafts, outcome.num_accepted)
        live.last_token_at = time.monotonic()
        live.first_token_at = live.first_token_at or live.last_token_at
        if live.history is not None:
            live.history.append(emitted)
        if live.grammar is not None:
            live.grammar.commit(emitted)
        logprobs = outcome.logprobs[: len(emitted)]
        delta = TokenDelta(
            request_id=live.request_id,
            first_token_index=live.num_output_tokens - len(emitted),
            token_ids=emitted,
            logprobs=logprobs,
            prompt_logprobs=tuple(live.prompt_logprobs) if is_first else (),
            text=text,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
        )
        if reason is None:
            return delta, None, row_stats
        ending = Ending(reason, stop_token_id, stop_string)
        return delta, self._close(live, ending), row_stats

    def _cut(
        self, live: LiveRequest, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """The emitted tokens up to the first that ends the request, and why it ends."""
        max_tokens = live.request.stopping.max_tokens
        min_tokens = live.request.stopping.min_tokens
        for index, token_id in enumerate(token_ids):
            num_output = live.num_output_tokens + index + 1
            if token_id in live.stop_token_ids and num_output > min_tokens:
                return token_ids[: index + 1], FinishReason.STOP_TOKEN, token_id
            if num_output >= max_tokens:
                return token_ids[: index + 1], FinishReason.LENGTH, None
            if live.num_tokens + index + 1 >= self._max_model_tokens:
                return token_ids[: index + 1], FinishReason.CONTEXT_FULL, None
        return token_ids, None, None

    def _count_computed(self, planned: PlannedRow, was_decoding: bool, num_drafts: int) -> None:
        live = planned.live
        end = planned.start + planned.num_tokens
        live.num_steps += 1
        if not was_decoding:
            live.num_prefill_positions += planned.num_tokens
        live.num_recomputed_tokens += max(
            0, min(end, live.num_ever_computed_tokens) - planned.start
        )
        live.num_ever_computed_tokens = max(live.num_ever_computed_tokens, end)

    def finish(
        self,
        live: LiveRequest,
        reason: FinishReason,
        error: str | None = None,
    ) -> tuple[TokenDelta, RequestStats]:
        """End a request outside the ordinary course: nothing more is emitted."""
        watcher = live.watcher
        delta = TokenDelta(
            request_id=live.request_id,
            first_token_index=live.num_output_tokens,
            token_ids=(),
            text=watcher.finish() if watcher is not None else None,
            finish_reason=reason,
            error=error,
        )
        return delta, self._close(live, Ending(reason), error)

    def _close(self, live: LiveRequest, ending: Ending, error: str | None = None) -> RequestStats:
        self._scheduler.remove(live, scrub=error is not None)
        self._on_closed(live, ending)
        self._drafters.forget(live.request_id)
        self._lengths.forget(live.request_id)
        return live.stats(ending.reason, time.monotonic(), error)


def _row_stats(
    outcome: RowOutcome, was_decoding: bool, num_emitted: int, proposal: Proposal
) -> RowStepStats:
    planned = outcome.planned
    num_decode = 1 if was_decoding else 0
    return RowStepStats(
        request_id=planned.live.request_id,
        num_prefill_positions=planned.num_tokens - num_decode,
        num_decode_positions=num_decode,
        num_draft_positions=outcome.num_drafts,
        num_accepted_tokens=outcome.num_accepted,
        num_emitted_tokens=num_emitted,
        num_drafter_positions=proposal.num_positions,
    )
