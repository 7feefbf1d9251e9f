"""Which rows share a forward. What is decided here never changes a token, only when a row runs.

`choose_group` is the policy of the grouped layout (EXSPEC): rows of a pool, by length and by what
they promise. `share_forwards` splits the rows of a step by how many tokens each computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_FULL = 0.8


@dataclass(frozen=True, slots=True)
class AttentionCosts:
    """What attention takes in one forward, all layers together: call_seconds for one more kernel
    call per layer, key_seconds for one key that one row reads."""

    call_seconds: float
    key_seconds: float

    def __post_init__(self) -> None:
        if not (self.call_seconds >= 0 and self.key_seconds >= 0):
            raise ValueError("costs must not be negative")


UNMEASURED = AttentionCosts(call_seconds=1.0, key_seconds=0.0)  # one call is best


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row that could run. length counts its tokens in the cache, expected_tokens what its next
    step should emit, num_skipped the groups it was left out of since it last ran. Rows of the same
    batch lie together in memory: none is moved because another one joins or leaves."""

    request_id: str
    length: int
    expected_tokens: float
    num_skipped: int
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of the next forward; is_uniform says that all have the same length."""

    request_ids: tuple[str, ...]
    is_uniform: bool


def choose_group(
    pool: Sequence[PoolRow], *, max_rows: int, max_skips: int, align_share: float
) -> Group:
    """At most max_rows of the pool, and all of it if it is no larger.

    In this order: rows left out max_skips times, the longest waiting first, with what aligns best
    to them; else the rows of one length that promise most tokens, unless a full group of
    different lengths promises more even after align_share of its time went into alignment.
    Among rows of one length those of similar expectation go together, the best first.

    A pool of P rows leaves none out more than max_skips + ceil(P / max_rows) - 1 times in a row.
    """
    if len(pool) <= max_rows:
        return _group(pool)
    overdue = sorted(
        (row for row in pool if row.num_skipped >= max_skips), key=lambda row: -row.num_skipped
    )[:max_rows]
    if overdue:
        return _group([*overdue, *_nearest(overdue, pool, max_rows - len(overdue))])
    uniform = max(_by_length(pool, max_rows), key=_promise)
    oldest = max(pool, key=lambda row: row.num_skipped)
    mixed = [oldest, *_nearest([oldest], pool, max_rows - 1)]
    if _promise(uniform)[0] >= (1 - align_share) * _promise(mixed)[0]:
        return _group(uniform)
    return _group(mixed)


def _group(rows: Sequence[PoolRow]) -> Group:
    return Group(tuple(r.request_id for r in rows), len({row.length for row in rows}) <= 1)


def _by_length(pool: Sequence[PoolRow], max_rows: int) -> list[list[PoolRow]]:
    """The best group of every length: the rows of highest expectation, then the longest waiting."""
    rows_of: dict[int, list[PoolRow]] = {}
    for row in pool:
        rows_of.setdefault(row.length, []).append(row)
    return [
        sorted(rows, key=lambda row: (-row.expected_tokens, -row.num_skipped))[:max_rows]
        for rows in rows_of.values()
    ]


def _promise(rows: Sequence[PoolRow]) -> tuple[float, int]:
    return sum(row.expected_tokens for row in rows), sum(row.num_skipped for row in rows)


def _nearest(chosen: Sequence[PoolRow], pool: Sequence[PoolRow], count: int) -> list[PoolRow]:
    """The `count` other rows that align best to the first chosen one: those that lie with it
    already, then those of the nearest lengths."""
    taken = {row.request_id for row in chosen}
    first = chosen[0]
    others = [row for row in pool if row.request_id not in taken]
    others.sort(
        key=lambda row: (
            row.batch != first.batch,
            abs(row.length - first.length),
            -row.num_skipped,
        )
    )
    return others[:count]


def split_by_keys(num_keys: Sequence[int], costs: AttentionCosts) -> list[range]:
    """Cut rows that lie in this order into runs that each take one kernel call.

    A call reads as many keys for all of its rows as its longest row needs. The cut that costs
    least: calls times call_seconds, plus keys read times key_seconds.
    """
    total = len(num_keys)
    if costs.key_seconds == 0 or min(num_keys) == max(num_keys):
        return [range(total)]
    best = [0.0] * (total + 1)  # best[stop]: the cheapest cut of the first `stop` rows
    start_of = [0] * (total + 1)
    for stop in range(1, total + 1):
        best[stop], longest = float("inf"), 0
        for start in range(stop - 1, -1, -1):
            longest = max(longest, num_keys[start])
            read = (stop - start) * longest * costs.key_seconds
            cost = best[start] + costs.call_seconds + read
            if cost < best[stop]:
                best[stop], start_of[stop] = cost, start
    runs: list[range] = []
    stop = total
    while stop:
        runs.append(range(start_of[stop], stop))
        stop = start_of[stop]
    return runs[::-1]


def share_forwards(widths: Sequence[int], max_shared_width: int) -> list[list[int]]:
    """Indices of rows that share a rectangle of new tokens, padded to the widest of them.

    Rows of up to max_shared_width tokens, which decode and verify, all share one. Wider ones,
    chunks of prompts, share while at most a fifth of what is computed is padding.
    """
    narrow = [index for index, width in enumerate(widths) if width <= max_shared_width]
    shared = [narrow] if narrow else []
    wide = sorted(
        (index for index, width in enumerate(widths) if width > max_shared_width),
        key=lambda index: -widths[index],
    )
    current: list[int] = []
    for index in wide:
        members = [*current, index]
        if sum(widths[i] for i in members) < _LEAST_FULL * widths[members[0]] * len(members):
            shared.append(current)
            members = [index]
        current = members
    return [*shared, current] if current else shared
