"""Which rows of a pool share the next forward: equal lengths need no realignment.

The policy of the grouped layout (EXSPEC), as one pure function. What it decides never changes a
token, only when each row runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolRow:
    """A row that could run. length counts its tokens in the cache, expected_tokens what its next
    step should emit, num_skipped the groups it was left out of since it last ran."""

    request_id: str
    length: int
    expected_tokens: float
    num_skipped: int


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
    """The `count` other rows whose lengths are nearest to those of the first chosen one."""
    taken = {row.request_id for row in chosen}
    length = chosen[0].length
    others = [row for row in pool if row.request_id not in taken]
    others.sort(key=lambda row: (abs(row.length - length), -row.num_skipped))
    return others[:count]
