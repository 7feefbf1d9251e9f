"""Logs: valid JSON with trace ids, bounded, and nothing that must not be in them."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from telemetry.logs import REDACTED, JsonFormatter, RateLimit, configure_logging

ROOT = Path(__file__).parents[2]


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    configure_logging("debug", stream=stream)
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


def _lines(output: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_the_ids_of_its_trace(output: io.StringIO) -> None:
    span = TracerProvider().get_tracer("t").start_span("x")
    with trace.use_span(span):
        logging.getLogger("a").info("two\nlines %s", "é", extra={"fields": {"num_rows": 3}})
    logging.getLogger("a").info("b", extra={"trace_id": "ab" * 16})
    first, second = _lines(output)
    assert first["message"] == "two\nlines é"
    assert first["fields"] == {"num_rows": 3}
    assert first["trace_id"] == format(span.get_span_context().trace_id, "032x")
    assert second["trace_id"] == "ab" * 16


@pytest.mark.parametrize(
    "name", ["prompt", "output", "authorization", "api-token", "client_secret", "Messages"]
)
def test_fields_that_could_carry_content_or_secrets_do_not(output: io.StringIO, name: str) -> None:
    fields = {name: "the secret thing", "num_output_tokens": 5, "drafter": "head"}
    logging.getLogger("a").warning("x", extra={"fields": fields})
    assert "the secret thing" not in output.getvalue()
    (line,) = _lines(output)
    assert line["fields"] == {name: REDACTED, "num_output_tokens": 5, "drafter": "head"}


def test_an_error_has_its_type_and_stack(output: io.StringIO) -> None:
    try:
        raise KeyError("k")
    except KeyError:
        logging.getLogger("a").exception("failed")
    (line,) = _lines(output)
    error = line["error"]
    assert isinstance(error, dict)
    assert error["type"] == "KeyError"
    assert "test_logs.py" in error["stack"]


def test_a_noisy_call_site_is_cut_and_says_how_much_was_left_out() -> None:
    now = [0.0]
    limit = RateLimit(burst=3, period_seconds=10, now=lambda: now[0])

    def emit(level: int = logging.INFO) -> logging.LogRecord:
        return logging.LogRecord("a", level, "f.py", 7, "m", None, None)

    assert [limit.filter(emit()) for _ in range(5)] == [True, True, True, False, False]
    assert limit.filter(emit(logging.CRITICAL))
    now[0] = 11.0
    record = emit()
    assert limit.filter(record)
    assert json.loads(JsonFormatter().format(record))["suppressed"] == 2


def test_the_log_of_a_process_is_rate_limited(output: io.StringIO) -> None:
    for number in range(500):
        logging.getLogger("a").info("noise %d", number)
    logging.getLogger("a").info("from elsewhere")
    told = [line["message"] for line in _lines(output)]
    assert told[:2] == ["noise 0", "noise 1"]
    assert told[-1] == "from elsewhere"
    assert len(told) < 50


def test_a_second_configuration_replaces_the_first_and_unknown_levels_are_refused(
    output: io.StringIO,
) -> None:
    second = io.StringIO()
    configure_logging("WARNING", as_json=False, stream=second)
    logging.getLogger("a").info("not important")
    logging.getLogger("a").warning("once")
    assert output.getvalue() == ""
    assert second.getvalue().endswith("WARNING  a: once\n")
    with pytest.raises(ValueError, match="LOUD"):
        configure_logging("loud")


def test_a_reader_that_has_stopped_costs_lines_and_no_time() -> None:
    program = (
        "import logging, sys\n"
        "from telemetry.logs import configure_logging\n"
        "configure_logging()\n"
        "for number in range(20_000):\n"
        "    logging.critical('%05d %s', number, 'x' * 100)\n"
        "print('done', flush=True)\n"
        "sys.stdin.readline()\n"
        "logging.getLogger().handlers[-1].flush()\n"
        "logging.critical('at last')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as logging_process:
        assert logging_process.stdout is not None
        assert logging_process.stdout.readline() == "done\n"  # nobody has read a line of its log
        _, errors = logging_process.communicate("\n")
    lines = [json.loads(line)["message"] for line in errors.splitlines()]
    assert lines[0].startswith("00000")
    assert lines[-1] == "at last"
    told = [line for line in lines if "are lost" in line]
    assert sum(int(line.split()[0]) for line in told) == 20_000 - (len(lines) - 1 - len(told)) > 0
