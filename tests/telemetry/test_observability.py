"""Independent receivers: Prometheus scrapes and alerts, Phoenix takes the traces over OTLP.

Slow, and left out where the programs are missing: `make test-observability` brings Phoenix into
a virtual environment of its own; Prometheus is Debian's package.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from telemetry.assembly import RecorderConfig, open_recorder
from telemetry.dashboards.generate import FOLDER
from telemetry.otel import OtelConfig, Telemetry, start_telemetry
from telemetry.prices import fixed_price
from telemetry.tracing import start_call_span, start_request_trace
from tests.ports import free_port
from tests.telemetry.recording_rig import MODEL_INFO, Rig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMETHEUS = shutil.which("prometheus")
PHOENIX = os.environ.get("TANDEM_TEST_PHOENIX", "")
METHOD = "tandem.v1.GenerationService/Generate"


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - a loopback address
        return json.loads(answer.read() or b"null")


def _wait_for(look: Callable[[], Any], seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := look():
                return found
        except OSError:
            pass
        assert time.monotonic() < deadline, "nothing arrived in time"
        time.sleep(0.2)


@contextmanager
def _running(command: list[str], **environment: str) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def _serve_requests(telemetry: Telemetry, folder: Path, num_requests: int = 3) -> list[str]:
    """Record some requests; their trace ids."""
    config = RecorderConfig(f"sqlite:///{folder}/l.db", folder / "journal", fixed_price("1"))
    recorder = open_recorder(config, MODEL_INFO, telemetry)
    rig = Rig(recorder, telemetry, config.ledger_url, None, None)  # type: ignore[arg-type]
    trace_ids = []
    for number in range(num_requests):
        call = start_call_span(METHOD, {}, telemetry.tracer)
        trace = start_request_trace(call, "tiny", tracer=telemetry.tracer)
        request = rig.begin(f"r{number}", trace=trace)
        rig.run_step(f"r{number}")
        rig.finish(request)
        call.end("OK")
        trace_ids.append(str(call.trace_id))
    recorder.close()
    return trace_ids


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus: install Debian's package")
def test_prometheus_scrapes_the_metrics_and_loads_the_alerts(tmp_path: Path) -> None:
    telemetry = start_telemetry(OtelConfig(prometheus_port=0))
    port = free_port()
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
                "rule_files": [str(FOLDER / "alerts.yaml")],
                "scrape_configs": [
                    {
                        "job_name": "tandem",
                        "static_configs": [{"targets": [f"127.0.0.1:{telemetry.prometheus_port}"]}],
                    }
                ],
            }
        )
    )
    base = f"http://127.0.0.1:{port}/api/v1"

    def query(expression: str) -> list[Any]:
        found = _get(f"{base}/query?{urllib.parse.urlencode({'query': expression})}")
        results: list[Any] = found["data"]["result"]
        return results

    _serve_requests(telemetry, tmp_path)
    with _running(
        [
            str(PROMETHEUS),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
    ):
        (series,) = _wait_for(lambda: query("tandem_requests_total"))
        assert series["metric"]["tandem_outcome"] == "completed"
        assert series["value"][1] == "3"
        assert query("gen_ai_server_time_to_first_token_seconds_count")[0]["value"][1] == "3"
        groups = _wait_for(lambda: _get(f"{base}/rules")["data"]["groups"])
        rules = groups[0]["rules"]
        assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
        assert len(rules) > 5
    telemetry.close()


@pytest.mark.skipif(not PHOENIX, reason="no Phoenix: make test-observability installs it")
def test_phoenix_takes_the_traces_and_finds_the_tokens(tmp_path: Path) -> None:
    port, grpc_port = free_port(), free_port()
    base = f"http://127.0.0.1:{port}"
    with _running(
        [PHOENIX, "serve"],
        PHOENIX_HOST="127.0.0.1",
        PHOENIX_PORT=str(port),
        PHOENIX_GRPC_PORT=str(grpc_port),
        PHOENIX_WORKING_DIR=str(tmp_path / "phoenix"),
        PHOENIX_TELEMETRY_ENABLED="false",
    ):
        _wait_for(lambda: _get(f"{base}/v1/projects")["data"], 120)
        endpoint = f"http://127.0.0.1:{grpc_port}"
        telemetry = start_telemetry(OtelConfig(otlp_endpoint=endpoint, otlp_signals=("traces",)))
        trace_ids = _serve_requests(telemetry, tmp_path)
        telemetry.close()
        assert telemetry.num_export_failures() == {}

        def all_spans() -> list[Any] | None:
            spans: list[Any] = _get(f"{base}/v1/projects/default/spans?limit=100")["data"]
            return spans if len(spans) >= 5 * len(trace_ids) else None

        spans = _wait_for(all_spans)
    assert {span["context"]["trace_id"] for span in spans} == set(trace_ids)
    generations = [span for span in spans if span["name"] == "text_completion tiny"]
    assert len(generations) == len(trace_ids)
    attributes = generations[0]["attributes"]
    assert 11 in (
        attributes.get("gen_ai.usage.output_tokens"),
        attributes.get("llm.token_count.completion"),
    )
