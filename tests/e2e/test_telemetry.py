"""A served model sends what telemetry.names declares, to a receiver of the real protocol."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from service.client_calls import TandemError
from telemetry import names
from telemetry.ledger.queries import check_ledger, ledger_stats
from telemetry.ledger.session import open_ledger
from tests.ledger_file import wait_until_filed
from tests.telemetry.otlp_receiver import Received, attributes_of, otlp_receiver

pytestmark = pytest.mark.thorough  # servers as processes, four in all

# What a healthy server without an energy counter has no reason to send.
NOT_IN_THIS_RUN = {
    names.PREEMPTIONS.name,
    names.BREAKER_CHANGES.name,
    names.DRAFTER_EVENTS.name,
    names.ENERGY.name,
    names.ENERGY_SOURCE_UP.name,
}
PROMPT = "0123456789 " * 9  # repeats itself, so that prompt lookup drafts


@contextmanager
def _served(
    model: Path, home: Path, *, is_killed: bool = False, **settings: str
) -> Iterator[Client]:
    """`tandem serve` as a process; it has ended, and sent everything unless killed, at the end."""
    command = [str(Path(sys.executable).with_name("tandem")), "serve", "--port", "0"]
    environment = {
        **os.environ,
        "TANDEM_TARGET": str(model),
        "TANDEM_HOME": str(home),
        "TANDEM_KV_CACHE_MEMORY": "2e8",
        **settings,
    }
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = next(line for line in server.stderr if line.startswith("serving on "))
        with Client(line.split()[-1]) as client:
            yield client
            if is_killed:
                server.kill()
                return
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


def _use(client: Client) -> None:
    for seed in range(3):
        client.generate(PROMPT, max_tokens=40, temperature=0.2, seed=seed).result()
    client.generate(PROMPT, max_tokens=10, temperature=0, speculation=False).result()
    with pytest.raises(TandemError):
        client.generate("x", temperature=-1).result()
    stream = client.generate("x", max_tokens=400)
    next(iter(stream))
    stream.cancel()
    client.load()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def received(tiny_model: Path, home: Path) -> Received:
    settings = {
        "TANDEM_STEP_SPAN_EVERY": "5",
        "TANDEM_AUDIT_SHARE": "1",
        "TANDEM_CAPTURE_FOLDER": str(home / "captured"),
        "TANDEM_CAPTURE_SHARE": "1",
    }
    with otlp_receiver() as receiver:
        with _served(
            tiny_model, home, TANDEM_OTLP_ENDPOINT=receiver.endpoint, **settings
        ) as client:
            _use(client)
        return receiver


def _points(metric: Any) -> list[Any]:
    return list(getattr(metric, metric.WhichOneof("data")).data_points)


def test_every_declared_metric_arrives_and_no_other(received: Received) -> None:
    declared = {spec.name: spec for spec in names.METRICS}
    assert set(received.metrics) - set(declared) == set()
    assert set(declared) - set(received.metrics) - NOT_IN_THIS_RUN == set()
    for name, metric in received.metrics.items():
        spec = declared[name]
        assert (metric.unit, metric.description) == (spec.unit, spec.description)
        kind = {"sum": "counter"}.get(metric.WhichOneof("data"), metric.WhichOneof("data"))
        assert kind == spec.instrument, name
        for point in _points(metric):
            assert set(attributes_of(point)) <= set(spec.attributes), name
            if spec.buckets:
                assert tuple(point.explicit_bounds) == spec.buckets, name


def test_the_metrics_say_what_the_run_did(received: Received) -> None:
    def values(spec: names.MetricSpec, attribute: str) -> dict[str, float]:
        points = _points(received.metrics[spec.name])
        return {attributes_of(p)[attribute]: p.as_int or p.as_double for p in points}

    assert values(names.REQUESTS, names.ATTR_OUTCOME) == {"completed": 4, "cancelled": 1}
    assert values(names.REJECTS, names.ATTR_REASON) == {"invalid_argument": 1}
    assert values(names.PREFIX_LOOKUPS, names.ATTR_CACHE_RESULT) == {"hit": 3, "miss": 2}
    assert values(names.DECISIONS, names.ATTR_DECISION)["draft"] > 0
    (drafted,) = values(names.DRAFTED, names.ATTR_DRAFTER).items()
    by_position = values(names.DRAFTED_BY_POSITION, names.ATTR_POSITION)
    assert drafted[0] == "prompt_lookup"
    assert sum(by_position.values()) == drafted[1] > 0
    verdicts = values(names.AUDITS, names.ATTR_VERDICT)
    assert verdicts.pop("exact") > 0
    assert verdicts == {"numeric_tie": 0, "divergence": 0}
    assert values(names.EXPORT_FAILURES, names.ATTR_KIND) == {"spans": 0, "metrics": 0}
    assert values(names.CAPTURED_PROMPTS, names.ATTR_CAPTURE_RESULT) == {"written": 5}


def test_what_a_request_took_leads_to_its_trace(received: Received) -> None:
    traces = {span.trace_id for span in received.spans}
    for spec in (
        names.TTFT,
        names.TPOT,
        names.REQUEST_DURATION,
        names.QUEUE_TIME,
        names.STEP_LATENCY,
        names.CALL_DURATION,
    ):
        points = _points(received.metrics[spec.name])
        shown = {exemplar.trace_id for point in points for exemplar in point.exemplars}
        assert shown, spec.name
        assert shown <= traces, spec.name


def test_spans_form_one_tree_per_call_and_steps_link_to_their_requests(received: Received) -> None:
    by_id = {span.span_id: span for span in received.spans}
    calls = [span for span in received.spans if span.name.endswith("/Generate")]
    assert len(calls) == 6
    generations = [s for s in received.spans if s.name.startswith("text_completion ")]
    assert len(generations) == 5
    for generation in generations:
        assert by_id[generation.parent_span_id] in calls
        phases = {s.name for s in received.spans if s.parent_span_id == generation.span_id}
        assert phases == {"queue", "prefill", "decode"}
    steps = [span for span in received.spans if span.name == names.SPAN_ENGINE_STEP]
    assert steps
    linked = {link.span_id for span in steps for link in span.links}
    assert linked <= {generation.span_id for generation in generations}
    assert linked


def test_telemetry_and_the_ledger_name_the_same_start_of_the_server(
    received: Received, home: Path
) -> None:
    with sqlite3.connect(home / "ledger.db") as ledger:
        instances = [row[0] for row in ledger.execute("SELECT instance_id FROM instances")]
    assert {attributes_of(r)["service.instance.id"] for r in received.resources} == {*instances}


def test_a_server_that_is_killed_leaves_its_requests_to_the_next_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    with _served(tiny_model, tmp_path, is_killed=True) as client:
        client.generate(PROMPT, request_id="done", max_tokens=8).result()
        wait_until_filed(tmp_path / "ledger.db", "SELECT 1 FROM requests")
        running = [  # so many that some still run when the first one's start is on disk
            client.generate(PROMPT, request_id=f"running-{at}", max_tokens=400, ignore_eos=True)
            for at in range(6)
        ]
        for stream in running:
            next(iter(stream))
        started = "SELECT 1 FROM request_starts WHERE request_id = 'running-5'"
        wait_until_filed(tmp_path / "ledger.db", started)
    with _served(tiny_model, tmp_path) as client:
        client.generate(PROMPT, request_id="after", max_tokens=8).result()
    engine = open_ledger(f"sqlite:///{tmp_path}/ledger.db", read_only=True)
    findings, stats = check_ledger(engine), ledger_stats(engine)
    engine.dispose()
    assert all(finding.is_good for finding in findings), findings
    assert set(stats.num_by_outcome) == {"completed", "orphaned"}
    assert sum(stats.num_by_outcome.values()) == len(running) + 2
    assert stats.num_open == 0


def test_no_text_of_a_request_is_in_any_span(received: Received) -> None:
    sent = b"".join(span.SerializeToString() for span in received.spans)
    assert b"0123456789" not in sent
