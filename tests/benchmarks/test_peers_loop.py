"""Engines are driven alike: rows are kept full, arrivals are awaited, what hangs is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import peers_loop
from tests.benchmarks.peers import run_group
from tests.benchmarks.peers_contenders import Contender
from tests.benchmarks.peers_environments import EnvironmentRefusedError
from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_loop import serve_batches, serve_steps
from tests.benchmarks.peers_parts import Parts
from tests.benchmarks.peers_workloads import Workload


def job(num_rows: int, lengths: tuple[int, ...], arrivals: tuple[float, ...] | None = None) -> Job:
    count = len(lengths)
    names = tuple(f"t{n}" for n in range(count))
    return Job("plain", num_rows, tuple((n + 1,) for n in range(count)), lengths, names, arrivals)


def counting(asked: Job) -> tuple[Callable[[int], None], Callable[[], Any], list[int]]:
    """An engine that gives every row a token a step; the list has the rows of each step."""
    running: dict[int, int] = {}
    rows: list[int] = []

    def step() -> list[tuple[int, list[int]]]:
        rows.append(len(running))
        new = []
        for index in list(running):
            running[index] += 1
            new.append((index, [10 * index + running[index]]))
            if running[index] == asked.max_tokens[index]:
                del running[index]
        return new

    return lambda index: running.update({index: 0}), step, rows


def test_rows_are_refilled_as_soon_as_one_is_done() -> None:
    asked = job(2, (1, 3, 2))
    submit, step, rows = counting(asked)
    served = serve_steps(asked, submit, step)
    assert [request.token_ids for request in served] == [(1,), (11, 12, 13), (21, 22)]
    assert rows == [2, 2, 2]
    assert all(r.sent_at <= r.first_at <= r.finished_at for r in served)
    assert served[2].sent_at >= served[0].finished_at


def test_requests_are_not_sent_before_they_arrive() -> None:
    asked = job(4, (2, 2), (0.0, 0.1))
    submit, step, rows = counting(asked)
    served = serve_steps(asked, submit, step)
    assert served[1].sent_at == 0.1  # and not when the loop came to it
    assert rows == [1, 1, 1, 1]


def test_an_engine_that_gives_no_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_loop, "_STALL_SECONDS", 0.01)
    with pytest.raises(RefusedError, match="no token"):
        serve_steps(job(1, (1,)), lambda index: None, lambda: [(0, [])])


def test_static_batches_take_what_has_arrived() -> None:
    batches: list[list[int]] = []

    def run_batch(batch: list[int], started: float) -> list[Served]:
        batches.append(batch)
        return [Served((index,), 0.0, 0.0, 0.0) for index in batch]

    served = serve_batches(job(2, (1, 1, 1)), run_batch)
    assert batches == [[0, 1], [2]]
    assert [request.token_ids for request in served] == [(0,), (1,), (2,)]
    batches.clear()
    serve_batches(job(2, (1, 1), (0.0, 0.05)), run_batch)
    assert batches == [[0], [1]]


class Scripted:
    """A process that answers; one of the reference, one of a peer."""

    refusal: str | None = None
    peak_bytes = 1

    def __init__(self) -> None:
        self.versions = {"scripted": "1"}
        self.num_asked = 0
        self.closed = False

    def ask(self, asked: Job) -> list[Served] | str:
        self.num_asked += 1
        return [Served((1,) * count, 0.0, 0.5, 1.0) for count in asked.max_tokens]

    def close(self) -> None:
        self.closed = True


CONTENDERS = (
    Contender("tandem_plain", "tandem", "plain", "torch"),
    Contender("peer", "peer", "plain", "other"),
)
WORKLOADS = [Workload("spec_bench", rows, (job(rows, (2, 2)),)) for rows in (1, 4, 8)]


def group(
    parts: Parts,
    *,
    has_time: Callable[[], bool] = lambda: True,
    broken: str = "",
) -> tuple[dict[str, str], list[str], dict[str, Scripted]]:
    started: dict[str, Scripted] = {}

    def start(kind: str) -> Any:
        if kind == broken:
            raise EnvironmentRefusedError("cannot be installed")
        return started.setdefault(kind, Scripted())

    refused, left = run_group("other", CONTENDERS, lambda: WORKLOADS, parts, start, 1, has_time)
    return refused, left, started


def test_other_engines_run_beside_our_plain_decoding_at_the_sizes_asked_of_them(
    tmp_path: Path,
) -> None:
    parts = Parts(tmp_path, {})
    refused, left, started = group(parts)
    assert (refused, left) == ({}, [])
    assert sorted(p.key for p in parts.all() if p.contender == "peer") == [
        "spec_bench@1",
        "spec_bench@8",
    ]
    assert started["tandem"].num_asked == started["peer"].num_asked == 4
    assert all(process.closed for process in started.values())
    assert group(parts)[2] == {}  # nothing is started where nothing is missing


def test_what_there_was_no_time_for_is_told_and_done_by_the_next_run(tmp_path: Path) -> None:
    parts = Parts(tmp_path, {})
    times = iter([True, False])
    refused, left, started = group(parts, has_time=lambda: next(times))
    assert (refused, left) == ({}, ["spec_bench@8"])
    assert all(process.closed for process in started.values())
    assert group(parts)[1] == []
    assert parts.find("peer", "spec_bench@8") is not None


def test_an_environment_that_cannot_be_made_is_refused_with_its_reason(tmp_path: Path) -> None:
    refused, _, started = group(Parts(tmp_path, {}), broken="peer")
    assert refused == {"peer": "cannot be installed"}
    assert "peer" not in started
