"""The comparison is fair by construction: same tokens, same limits, ratios within a round."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import peers_process
from tests.benchmarks.peers_comparison import Comparison, percentiles, summary, warm_up
from tests.benchmarks.peers_contenders import Contender
from tests.benchmarks.peers_jobs import Job, RefusedError, Served
from tests.benchmarks.peers_parts import Parts
from tests.benchmarks.peers_plot import plot
from tests.benchmarks.peers_process import PeerProcess
from tests.benchmarks.peers_report import report
from tests.benchmarks.peers_tandem import Tandem
from tests.benchmarks.peers_transformers import ContinuousBatching, Generate
from tests.benchmarks.peers_worker import answer
from tests.benchmarks.peers_workloads import Effort, Workload, Workloads
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.thorough
PROMPTS = ((5, 6, 7, 8) * 3, (9, 10, 11), (12, 13, 14, 15, 16) * 2)
LENGTHS = (9, 4, 6)
TENANTS = ("a", "b", "c")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def generate(folder: str) -> Generate:
    return Generate(folder, "float32", 4, 1)


def job(num_rows: int, mode: str = "plain", arrivals: tuple[float, ...] | None = None) -> Job:
    return Job(mode, num_rows, PROMPTS, LENGTHS, TENANTS, arrivals)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_all_peers_give_the_tokens_of_generate_and_as_many_as_asked(
    folder: str, generate: Generate, num_rows: int
) -> None:
    expected = [request.token_ids for request in generate.run(job(1))]
    assert tuple(map(len, expected)) == LENGTHS
    tandem = Tandem(folder, "float32", 2, 1)
    for mode in ("plain", "speculative"):
        assert [r.token_ids for r in tandem.run(job(num_rows, mode))] == expected
    assert [r.token_ids for r in generate.run(job(num_rows))] == expected
    batching = ContinuousBatching(folder, "float32", 2, 1)
    try:
        assert [r.token_ids for r in batching.run(job(num_rows))] == expected
    finally:
        batching.close()


def test_times_follow_the_order_of_what_happened(folder: str, generate: Generate) -> None:
    arrivals = (0.0, 0.2, 0.4)
    for peer in (generate, Tandem(folder, "float32", 2, 1)):
        for served, arrived_at in zip(peer.run(job(2, arrivals=arrivals)), arrivals, strict=True):
            assert served.sent_at == arrived_at  # waiting for a place counts
            assert arrived_at <= served.first_at <= served.finished_at


def test_assisted_generation_of_batches_and_speculation_in_batching_are_refused(
    generate: Generate,
) -> None:
    with pytest.raises(RefusedError, match="one row"):
        generate.run(job(2, "speculative"))
    assert len(generate.run(job(1, "speculative"))) == 3
    with pytest.raises(RefusedError, match="does not speculate"):
        ContinuousBatching.run(object.__new__(ContinuousBatching), job(1, "speculative"))


def test_a_peer_that_cannot_start_reports_why(tmp_path: Path) -> None:
    process = PeerProcess("transformers_generate", str(tmp_path / "nowhere"), "float32", 1, 1)
    assert process.refusal
    assert process.ask(job(1)) == process.refusal


def test_a_process_that_dies_is_refused_and_can_be_closed(folder: str) -> None:
    process = PeerProcess("transformers_generate", folder, "float32", 2, 1)
    assert process.refusal is None
    served = process.ask(job(2))
    assert not isinstance(served, str)
    assert tuple(len(request.token_ids) for request in served) == LENGTHS
    assert process.peak_bytes > 2**26
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    for _ in range(2):
        assert "died" in process.ask(job(2))
    process.close()
    assert "ended" in process.ask(job(2))


def test_a_peer_that_hangs_at_its_start_is_ended_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 300\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(peers_process, "_START_SECONDS", 0.2)
    process = PeerProcess("tandem", "model", "float32", 1, 1, name="hangs", python=str(hanging))
    assert process.refusal == "gave no answer for 0 s"
    assert process._process is None


def wait_until_stopped(pid: int) -> None:
    """A signal takes a moment to reach all threads."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline, "the process runs on"
        time.sleep(0.02)


def test_a_process_sleeps_but_while_it_works(folder: str) -> None:
    process = PeerProcess("transformers_generate", folder, "float32", 1, 1)
    try:
        for _ in range(2):
            assert process._process is not None
            wait_until_stopped(process._process.pid)
            assert not isinstance(process.ask(job(1)), str)
    finally:
        process.close()


def test_a_peer_that_breaks_during_a_job_reports_why() -> None:
    class Broken:
        def run(self, job: Job) -> list[Served]:
            raise MemoryError("no room\nfor more")

    assert answer(Broken(), json.dumps(job(1).to_json())) == {"refused": "MemoryError: no room"}


@pytest.mark.parametrize(
    "arrivals", [(0.0, 0.0), (0.0, 2.0, 1.0)], ids=["one missing", "not ascending"]
)
def test_jobs_that_make_no_sense_are_refused(arrivals: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="arrivals"):
        job(1, arrivals=arrivals)
    with pytest.raises(ValueError, match="one entry per request"):
        Job("plain", 1, PROMPTS, LENGTHS[:2], TENANTS)


def test_a_job_survives_its_journey_as_json() -> None:
    sent = replace(job(2, arrivals=(0.0, 1.0, 1.5)), shares_prefixes=True)
    assert Job.from_json(sent.to_json()) == sent


class ScriptedProcess:
    """Answers with tokens at a scripted speed per mode and job."""

    peak_bytes = 7

    def __init__(self, seconds: Callable[[Job, int], float], *, refuses: str = "") -> None:
        self._seconds, self._refuses, self.asked = seconds, refuses, []
        self.versions = {"scripted": "1"}
        self.token_id = 1

    def ask(self, asked: Job) -> list[Served] | str:
        self.asked.append(asked)
        if asked.mode == self._refuses:
            return "will not"
        seconds = self._seconds(asked, len(self.asked))
        return [Served((self.token_id,) * n, 0.0, seconds / 2, seconds) for n in asked.max_tokens]


CONTENDERS = (
    Contender("tandem_plain", "tandem", "plain", "torch"),
    Contender("tandem_speculative", "tandem", "speculative", "torch", plain="tandem_plain"),
    Contender("generate", "generate", "plain", "torch", is_torch_peer=True),
    Contender("assisted", "generate", "speculative", "torch", plain="generate"),
    Contender("int8", "int8", "plain", "other"),
)
WORKLOAD = Workload("spec_bench", 2, (job(2), job(2)))


class Bench:
    """Scripted contenders over parts in a folder; the machine gets slower and slower."""

    def __init__(self, folder: Path, **settings: str) -> None:
        # Ratios within a round do not care how slow the machine has become.
        self.ours = ScriptedProcess(lambda j, n: n * (0.5 if j.mode == "speculative" else 1.0))
        self.theirs = ScriptedProcess(lambda j, n: 4.0 * n, refuses="speculative")
        self.int8 = ScriptedProcess(lambda j, n: 0.25)
        self.parts = Parts(folder, settings)
        self.processes: dict[str, Any] = {
            "tandem": self.ours, "generate": self.theirs, "int8": self.int8,
        }  # fmt: skip

    def run(self, *, rounds: int, without: tuple[str, ...] = ()) -> Comparison:
        chosen = [c for c in CONTENDERS if c.name not in without]
        comparison = Comparison(self.processes, chosen, self.parts)
        comparison.run(WORKLOAD, rounds)
        return comparison

    def report(self) -> dict[str, Any]:
        return report(self.parts.all(), CONTENDERS)


def test_ratios_are_taken_within_a_round_and_the_warm_up_is_not_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(rounds=3)
    result = bench.report()
    runs = result["peers"]["spec_bench@2"]
    assert {name: len(found) for name, found in runs.items()} == {
        "tandem_plain": 3,
        "tandem_speculative": 3,
        "generate": 3,
        "int8": 3,
    }
    assert len(bench.ours.asked) == 2 * 2 * 4
    assert len({asked.tenants for asked in bench.ours.asked if asked.mode == "plain"}) == 4
    assert result["best_torch_peer"] == {"2": "generate"}
    assert set(result["plain_over_best_torch_peer"]) == {"2"}
    own, rival, int8 = (
        [run["tokens_per_second"] for run in runs[name]]
        for name in ("tandem_plain", "generate", "int8")
    )
    ratios = sorted(a / b for a, b in zip(own, rival, strict=True))
    assert result["plain_over_best_torch_peer"]["2"]["median"] == pytest.approx(ratios[1], abs=1e-4)
    assert result["speculative_over_plain"]["2"]["spec_bench"]["median"] > 1
    quantised = sorted(a / b for a, b in zip(own, int8, strict=True))
    (by_key,) = result["plain_over_other_peers"].values()
    assert by_key["spec_bench@2"]["median"] == pytest.approx(quantised[1], abs=1e-4)


def test_the_best_torch_peer_is_the_fastest_and_no_quantised_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.processes["eager"] = ScriptedProcess(lambda j, n: 3.0 * n)
    eager = Contender("eager", "eager", "plain", "torch", is_torch_peer=True)
    Comparison(bench.processes, [*CONTENDERS, eager], bench.parts).run(WORKLOAD, 1)
    result = report(bench.parts.all(), [*CONTENDERS, eager])
    assert result["best_torch_peer"] == {"2": "eager"}
    (run,) = result["peers"]["spec_bench@2"]["eager"]
    (own,) = result["peers"]["spec_bench@2"]["tandem_plain"]
    expected = own["tokens_per_second"] / run["tokens_per_second"]
    assert result["plain_over_best_torch_peer"]["2"]["median"] == pytest.approx(expected, abs=1e-4)


def test_a_peers_speculation_is_compared_with_its_own_plain_decoding(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.theirs._refuses = ""
    bench.run(rounds=1)
    result = bench.report()
    (plain,), (assisted,) = (
        result["peers"]["spec_bench@2"][name] for name in ("generate", "assisted")
    )
    found = result["peers_speculative_over_their_plain"]["assisted"]["spec_bench@2"]["median"]
    ratio = assisted["tokens_per_second"] / plain["tokens_per_second"]
    assert found == pytest.approx(ratio, abs=1e-4)


def test_a_refusal_is_reported_once_with_its_reason_and_asked_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    comparison = bench.run(rounds=2)
    assert comparison.refused == {"assisted spec_bench@2": "will not"}
    assert sum(asked.mode == "speculative" for asked in bench.theirs.asked) == 1
    assert "assisted" not in bench.report()["peers"]["spec_bench@2"]


def test_an_interrupted_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    Bench(tmp_path).run(rounds=2, without=("int8", "assisted"))
    again = Bench(tmp_path)
    again.run(rounds=2)
    assert [asked.mode for asked in again.theirs.asked] == ["speculative"]  # refused, so not kept
    assert {asked.mode for asked in again.ours.asked} == {"plain"}  # as the reference alone
    assert len(again.int8.asked) == 2 * 3
    part = again.parts.find("int8", "spec_bench@2")
    assert part is not None
    first = again.parts.find("tandem_plain", "spec_bench@2")
    assert first is not None
    assert part.reference != first.rounds  # of the rounds in which int8 ran
    quiet = Bench(tmp_path)
    quiet.theirs._refuses = "everything"
    quiet.run(rounds=2, without=("assisted",))
    assert not quiet.ours.asked


@pytest.mark.parametrize("changed", [{"engine": "b"}, {"dtype": "float32"}])
def test_parts_of_another_engine_or_dtype_are_not_found(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    settings = {"engine": "a", "dtype": "bfloat16"}
    Bench(tmp_path, **settings).run(rounds=1)
    assert Parts(tmp_path, settings).all()
    assert not Parts(tmp_path, settings | changed).all()


def test_tokens_that_differ_from_our_plain_run_are_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.int8.token_id = 2
    bench.run(rounds=1)
    found = bench.report()["identical_tokens"]
    assert found == {"generate": 1, "int8": 0, "tandem_speculative": 1}


def test_a_warm_up_is_short_and_shares_nothing(tmp_path: Path) -> None:
    long = Job("plain", 2, PROMPTS, (9, 4, 60), TENANTS, (0.0, 1.0, 2.0), shares_prefixes=True)
    assert warm_up(long) == Job("plain", 2, PROMPTS[:2], (8, 4), TENANTS[:2])


def test_figures_of_a_run() -> None:
    served = [Served((1,) * 5, 0.0, 1.0, 3.0), Served((1,), 0.5, 4.0, 4.0)]
    found = summary(served, 4.0)
    assert found["tokens_per_second"] == 1.5
    assert found["tpot_seconds"] == {"p50": 0.5, "p99": 0.5}  # one token has no gaps
    assert found["ttft_seconds"] == {"p50": 1.0, "p99": 3.5}
    assert percentiles(range(1, 201)) == {"p50": 100, "p99": 198}


def workloads(effort: Effort) -> Workloads:
    prompts = [
        (category, f"{category} number {n} " + "word " * (90 if category == "summarization" else n))
        for category in ("qa", "math", "summarization")
        for n in range(6)
    ]
    return Workloads(lambda text: [ord(c) for c in text], prompts, effort)


def test_workloads_have_the_lengths_asked_for_and_agents_a_growing_prefix() -> None:
    effort = Effort((1, 4), (4,), 2, 3, (8, 4), 60, 90, 5, 1, categories=True)
    made = workloads(effort)
    closed = made.closed()
    assert {w.name for w in closed} == {
        "spec_bench", "summary", "code", "agent", "spec_bench/qa", "spec_bench/math",
    }  # fmt: skip
    for workload in closed:
        for item in workload.jobs:
            assert item.num_rows == workload.num_rows
            assert item.max_tokens[:2] == ((8, 4) if len(item.prompts) > 1 else (8,))
            assert len(item.prompts) >= (3 if workload.name != "agent" else 1)
            assert item.shares_prefixes == (workload.name == "agent")
            longest = max(map(len, item.prompts))
            assert longest <= (90 if workload.name in ("summary", "code") else 180)
    (agent,) = [w for w in closed if w.name == "agent" and w.num_rows == 4]
    for before, after in zip(agent.jobs, agent.jobs[1:], strict=False):
        assert before.tenants == after.tenants
        for short, long in zip(before.prompts, after.prompts, strict=True):
            assert long[: len(short)] == short
            assert len(long) > len(short)


def test_open_loop_arrivals_have_the_rate_asked_for() -> None:
    effort = Effort((4,), (4,), 2, 3, (8, 4), 60, 90, 400, 1, categories=False)
    (item,) = workloads(effort).open(5.0, 4).jobs
    assert item.arrivals is not None
    assert len(item.arrivals) == len(item.prompts) == 400
    assert item.arrivals[0] == 0
    assert 399 / item.arrivals[-1] == pytest.approx(5.0)
    gaps = {round(b - a, 3) for a, b in itertools.pairwise(item.arrivals)}
    assert len(gaps) > 100  # as irregular as recorded


def test_the_plot_is_drawn_from_the_report(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run(rounds=1)
    plot(bench.report() | {"dtype": "float32", "threads": 1}, tmp_path / "peers.png")
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
