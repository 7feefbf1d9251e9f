"""Who runs this step, and how many tokens of each.

The one rule. There is no prefill and no decode: a request has num_computed_tokens and
num_tokens plus drafts, and a step lets the first catch up with the second, under a budget
of tokens and of cache. A prompt in chunks, a decode, a verification and the recomputation
after a preemption are all that rule; a rejection is that the first stays behind.

Order. Decoding rows come first, so a long prompt never stalls running streams. Then rows
that still catch up, then the waiting: highest priority (which grows while it waits), then
the tenant with fewest rows, then the oldest. When the cache is full the running request
that ranks last gives its place back and recomputes later; the first always keeps its own,
so the smallest pool makes progress.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.block_pool import OutOfBlocksError
from engine.layout.grouping import PoolRow, choose_group
from engine.live_request import LiveRequest
from engine.row_cache import RowCache

_SECONDS_PER_PRIORITY = 10.0  # waiting this long is worth one level of priority
_MAX_SKIPS = 3  # groups that a decoding row may be left out of before it has to run
_ALIGN_SHARE = 0.1  # of a step's time, that aligning rows of different lengths takes


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """Tokens start..start+num_tokens-1 of a request are computed in this step.

    max_drafts more may be verified after them; 0 unless the row reaches its newest token.
    """

    live: LiveRequest
    start: int
    num_tokens: int
    max_drafts: int

    @property
    def emits(self) -> bool:
        """The row reaches its newest token, so the step yields its next one."""
        return self.start + self.num_tokens == self.live.num_tokens


class Scheduler:
    """The queue of waiting requests and the list of running ones."""

    def __init__(
        self,
        cache: RowCache,
        *,
        max_step_tokens: int,
        max_model_tokens: int,
        group_rows: int | None = None,
    ) -> None:
        """group_rows: decoding rows per step, chosen by layout/grouping; None runs all."""
        self.cache = cache
        self.max_step_tokens = max_step_tokens
        self.max_model_tokens = max_model_tokens
        self.waiting: dict[str, LiveRequest] = {}
        self.running: dict[str, LiveRequest] = {}
        self.num_preemptions = 0
        self._preempted: list[str] = []
        self.num_groups = 0
        self.num_uniform_groups = 0
        self.group_rows = group_rows
        self._num_skipped: dict[str, int] = {}
        self._left_out: frozenset[str] = frozenset()

    def add(self, live: LiveRequest) -> None:
        self.waiting[live.request_id] = live

    def find(self, request_id: str) -> LiveRequest | None:
        return self.running.get(request_id) or self.waiting.get(request_id)

    def remove(self, live: LiveRequest, *, scrub: bool = False) -> None:
        """Take a request out, wherever it is, and give its place back."""
        self.waiting.pop(live.request_id, None)
        self.running.pop(live.request_id, None)
        if live.row is not None:
            self.cache.free_row(live.row, scrub=scrub)
            live.row = None

    def live_requests(self) -> Iterator[LiveRequest]:
        yield from self.running.values()
        yield from self.waiting.values()

    def outlook(
        self, expected_tokens: Callable[[LiveRequest], float]
    ) -> tuple[list[LiveRequest], int]:
        """The decoding requests of the next step, and how many tokens of others may share their
        forward. Where rows run in groups this chooses the group; expected_tokens says what a
        request's next step should emit."""
        decoding = [live for live in self.running.values() if live.is_decoding]
        catching_up = sum(
            live.num_tokens - live.num_computed_tokens
            for live in self.running.values()
            if not live.is_decoding
        )
        if self.group_rows is not None:
            decoding = self._choose_group(decoding, self.group_rows, expected_tokens)
        return decoding, min(catching_up, max(0, self.max_step_tokens - len(decoding)))

    def _choose_group(
        self,
        decoding: Sequence[LiveRequest],
        max_rows: int,
        expected_tokens: Callable[[LiveRequest], float],
    ) -> list[LiveRequest]:
        pool = [
            PoolRow(
                live.request_id,
                live.num_computed_tokens,
                expected_tokens(live),
                self._num_skipped.get(live.request_id, 0),
                self.cache.batch_of(live.row),
            )
            for live in decoding
            if live.row is not None
        ]
        if not pool:
            return []
        group = choose_group(
            pool, max_rows=max_rows, max_skips=_MAX_SKIPS, align_share=_ALIGN_SHARE
        )
        self.num_groups += 1
        self.num_uniform_groups += group.is_uniform
        chosen = frozenset(group.request_ids)
        self._left_out = frozenset(row.request_id for row in pool) - chosen
        self._num_skipped = {
            row.request_id: row.num_skipped + 1 for row in pool if row.request_id in self._left_out
        }
        return [live for live in decoding if live.request_id in chosen]

    def schedule(self, now: float, max_drafts: "dict[str, int]") -> list[PlannedRow]:
        """Plan one step. max_drafts says how many tokens each running request may draft."""
        plan: list[PlannedRow] = []
        budget = self.max_step_tokens
        ranked = self._ranked(self.running.values(), now)
        for live in sorted(ranked, key=lambda live: not live.is_decoding):
            if live.row is None or live.request_id in self._left_out:
                continue  # preempted by one before it, or of another group
            planned = self._plan_row(live, budget, max_drafts.get(live.request_id, 0), plan, now)
            if planned is not None:
                plan.append(planned)
                budget -= planned.num_tokens + planned.max_drafts
        while budget > 0 and self.waiting and self.cache.num_free_rows:
            live = min(self.waiting.values(), key=self._rank(now))
            if not self._admit(live, now):
                break
            planned = self._plan_row(live, budget, 0, plan, now)
            if planned is None:
                break
            plan.append(planned)
            budget -= planned.num_tokens
        return plan

    def _ranked(self, requests: Iterable[LiveRequest], now: float) -> list[LiveRequest]:
        return sorted(requests, key=self._rank(now))

    def _rank(self, now: float) -> Callable[[LiveRequest], tuple[int, int, float, str]]:
        """The order of requests: what comes first runs first."""
        rows_of = Counter(live.request.tenant for live in self.running.values())

        def rank(live: LiveRequest) -> tuple[int, int, float, str]:
            request = live.request
            waited = max(0.0, now - request.arrived_at) if live.row is None else 0.0
            level = request.priority + int(waited / _SECONDS_PER_PRIORITY)
            share = rows_of[request.tenant] if live.row is None else 0
            return (-level, share, request.arrived_at, request.request_id)

        return rank

    def _plan_row(
        self, live: LiveRequest, budget: int, max_drafts: int, plan: list[PlannedRow], now: float
    ) -> PlannedRow | None:
        num_tokens = min(live.num_tokens - live.num_computed_tokens, budget)
        if num_tokens <= 0:
            return None
        reaches_end = live.num_computed_tokens + num_tokens == live.num_tokens
        drafts = self._clip_drafts(live, max_drafts, budget - num_tokens) if reaches_end else 0
        end = live.num_computed_tokens + num_tokens
        if not self._reserve(live, end + drafts):
            drafts = 0
            while not self._reserve(live, end):
                victim = self._victim(live, plan, now)
                if victim is None:
                    return None
                self._preempt(victim)
                if victim is live:
                    return None
        return PlannedRow(live, live.num_computed_tokens, num_tokens, drafts)

    def _clip_drafts(self, live: LiveRequest, max_drafts: int, budget: int) -> int:
        remaining = live.request.stopping.max_tokens - live.num_output_tokens
        room = self.max_model_tokens - live.num_tokens
        return max(0, min(max_drafts, remaining - 1, room - 1, budget))

    def _reserve(self, live: LiveRequest, num_tokens: int) -> bool:
        assert live.row is not None  # noqa: S101 - for the type checker; callers check
        try:
            self.cache.reserve(live.row, num_tokens)
        except OutOfBlocksError:
            return False
        return True

    def _victim(self, live: LiveRequest, plan: list[PlannedRow], now: float) -> LiveRequest | None:
        """The lowest ranked running request that this step has not planned yet."""
        planned = {row.live.request_id for row in plan}
        candidates = [
            other
            for other in self._ranked(self.running.values(), now)
            if other.request_id not in planned
        ]
        return candidates[-1] if candidates else None

    def _preempt(self, live: LiveRequest) -> None:
        if live.row is not None:
            self.cache.free_row(live.row)
        live.row = None
        live.num_computed_tokens = 0
        live.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted.append(live.request_id)
        del self.running[live.request_id]
        self.waiting[live.request_id] = live

    def take_preempted(self) -> tuple[str, ...]:
        """The requests that were preempted since the last call, as often as they were."""
        taken, self._preempted = tuple(self._preempted), []
        return taken

    def _admit(self, live: LiveRequest, now: float) -> bool:
        num_blocks = -(-(live.num_tokens + 1) // self.cache.block_size)
        if self.running and num_blocks > self.cache.pool.num_available:
            return False
        try:
            live.row, num_cached = self.cache.allocate_row(live.token_ids, live.cache_salt)
        except OutOfBlocksError:
            return False
        live.num_computed_tokens = num_cached
        if live.first_scheduled_at is None:
            live.first_scheduled_at = now
            live.num_cached_prompt_tokens = num_cached
        del self.waiting[live.request_id]
        self.running[live.request_id] = live
        return True

    def check_integrity(self) -> None:
        """Rows, lengths and counters agree; raises RuntimeError naming the first difference."""
        for live in self.running.values():
            if live.row is None:
                raise RuntimeError(f"{live.request_id} runs without a row")
            length = self.cache.length(live.row)
            if length != live.num_computed_tokens:
                raise RuntimeError(
                    f"{live.request_id}: {live.num_computed_tokens} tokens computed, "
                    f"{length} in the cache"
                )
            if not 0 <= live.num_computed_tokens < live.num_tokens:
                raise RuntimeError(f"{live.request_id}: the newest token has keys already")
        for live in self.waiting.values():
            if live.row is not None:
                raise RuntimeError(f"{live.request_id} waits but holds a row")
        if len(self.running) + self.cache.num_free_rows != self.cache.max_num_rows:
            raise RuntimeError("a row belongs to no running request")
        self.cache.check_integrity()
