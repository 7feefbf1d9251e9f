"""Prompts kept for training: off unless asked for, redacted, opted out of, forgotten in time."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from pydantic import ValidationError

from engine.request import SamplingParams, SpeculationParams, StoppingParams
from service.capture import PromptCapture
from service.orders import ChatPrompt, GenerationOrder, Prompt, TextPrompt, TokenPrompt
from service.redaction import RedactionError, open_redaction
from service.security import AccessFileError, read_access_file
from service.settings import ServiceSettings
from telemetry import names
from telemetry.instruments import create_instrument

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def _order(prompt: Prompt, resume_token_ids: tuple[int, ...] = ()) -> GenerationOrder:
    return GenerationOrder(
        request_id="r",
        model="",
        prompt=prompt,
        sampling=SamplingParams(temperature=0),
        stopping=StoppingParams(),
        speculation=SpeculationParams(),
        resume_token_ids=resume_token_ids,
    )


def _kept(
    folder: Path, *orders: GenerationOrder, is_allowed: bool = True, **options: object
) -> tuple[list[dict[str, object]], PromptCapture]:
    known: dict[str, object] = {"share": 1.0, "retention_days": 30, "clock": lambda: NOW}
    capture = PromptCapture(folder, **{**known, **options})  # type: ignore[arg-type]
    for order in orders:
        capture.offer(order, is_allowed=is_allowed)
    capture.close()
    path = folder / "prompts-2026-11-30.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines], capture


def _chat(text: str = "hello", **options: object) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": text},), **options)  # type: ignore[arg-type]


def test_texts_and_chats_are_kept_as_training_reads_them(tmp_path: Path) -> None:
    kept, capture = _kept(tmp_path / "new", _order(TextPrompt("one\ntwo")), _order(_chat("hé")))
    assert kept == [
        {"prompt": "one\ntwo", "source": "captured"},
        {"messages": [{"role": "user", "content": "hé"}], "source": "captured"},
    ]
    assert capture.counts.num_written == 2
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "prompts-2026-11-30.jsonl").stat().st_mode & 0o777 == 0o600


def test_what_is_no_conversation_of_its_own_is_not_kept(tmp_path: Path) -> None:
    kept, _ = _kept(
        tmp_path,
        _order(TokenPrompt((1, 2, 3))),
        _order(_chat(tools=({"name": "t"},))),
        _order(_chat(continue_last_message=True)),
        _order(TextPrompt("again"), resume_token_ids=(1,)),
    )
    assert kept == []


def test_who_opted_out_is_not_kept(tmp_path: Path) -> None:
    kept, _ = _kept(tmp_path, _order(TextPrompt("x")), is_allowed=False)
    assert kept == []


def test_a_share_is_kept(tmp_path: Path) -> None:
    orders = [_order(TextPrompt(str(index))) for index in range(1000)]
    kept, _ = _kept(tmp_path, *orders, share=0.2, max_waiting=2000)
    assert 120 <= len(kept) <= 280


def test_old_days_are_removed_and_other_files_are_not(tmp_path: Path) -> None:
    for name in ("prompts-2026-11-22.jsonl", "prompts-2026-11-23.jsonl", "prompts-mine.jsonl"):
        (tmp_path / name).write_text("{}\n")
    _kept(tmp_path, _order(TextPrompt("x")), retention_days=7)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "prompts-2026-11-23.jsonl",
        "prompts-2026-11-30.jsonl",
        "prompts-mine.jsonl",
    ]


def test_a_day_that_ends_removes_what_is_too_old_then(tmp_path: Path) -> None:
    days = iter([NOW, NOW, datetime(2026, 12, 9, tzinfo=UTC)])
    _kept(
        tmp_path,
        _order(TextPrompt("x")),
        _order(TextPrompt("y")),
        retention_days=7,
        clock=lambda: next(days),
    )
    assert [path.name for path in tmp_path.iterdir()] == ["prompts-2026-12-09.jsonl"]


def test_a_writer_that_is_behind_costs_prompts_and_no_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    may_go_on = threading.Event()

    def slow(text: str) -> str:
        may_go_on.wait(30)
        return text

    capture = PromptCapture(
        tmp_path, share=1, retention_days=1, redact=slow, clock=lambda: NOW, max_waiting=3
    )
    for index in range(10):
        capture.offer(_order(TextPrompt(str(index))), is_allowed=True)
    assert capture.counts.num_dropped >= 6
    assert len([r for r in caplog.records if "faster than" in r.getMessage()]) == 1
    may_go_on.set()
    capture.close()
    assert capture.counts.num_written + capture.counts.num_dropped == 10


def _drop_secrets(text: str) -> str | None:
    if "raise" in text:
        raise ValueError(f"cannot read {text}")
    return None if "nothing" in text else text.replace("secret", "s*****")


REDACTION = f"{__name__}:_drop_secrets"


def test_a_function_redacts_and_one_that_fails_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redact = open_redaction(REDACTION)
    texts = ("a secret", "nothing of this", "raise on private words")
    kept, capture = _kept(tmp_path, *(_order(_chat(t)) for t in texts), redact=redact)
    assert kept == [{"messages": [{"role": "user", "content": "a s*****"}], "source": "captured"}]
    assert capture.counts.num_left_out == 2
    assert "redaction raised ValueError" in caplog.text
    assert "private words" not in caplog.text


def test_patterns_of_a_file_redact(tmp_path: Path) -> None:
    (tmp_path / "patterns").write_text("# mail\n[\\w.]+@[\\w.]+\n\n\\b\\d{4,}\\b\n")
    redact = open_redaction(str(tmp_path / "patterns"))
    kept, _ = _kept(tmp_path, _order(TextPrompt("to a.b@c.de, 12345 or 12")), redact=redact)
    assert kept[0]["prompt"] == "to [redacted], [redacted] or 12"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: "no.such_module:function", "no.such_module:function: No module"),
        (lambda folder: f"{__name__}:nothing", "has no attribute 'nothing'"),
        (lambda folder: f"{__name__}:NOW", "is no function"),
        (lambda folder: str(folder / "absent"), "absent"),
        (lambda folder: _file(folder, "# only words\n"), "has no pattern"),
        (lambda folder: _file(folder, "ok\n(\n"), r"patterns:2: missing \)"),
    ],
)
def test_a_redaction_that_cannot_be_used_is_refused(
    tmp_path: Path, make: Callable[[Path], str], reason: str
) -> None:
    with pytest.raises(RedactionError, match=f"capture_redaction: .*{reason}"):
        open_redaction(make(tmp_path))


def _file(folder: Path, text: str) -> str:
    (folder / "patterns").write_text(text)
    return str(folder / "patterns")


def test_what_became_of_prompts_is_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("t")
    counter = create_instrument(meter, names.CAPTURED_PROMPTS)
    monkeypatch.setattr("telemetry.capture_counts._prompts", counter)
    orders = [_order(TextPrompt(text)) for text in ("one", "two", "nothing of this", "raise")]
    _kept(tmp_path, *orders, redact=open_redaction(REDACTION))
    (tmp_path / "taken" / "prompts-2026-11-30.jsonl").mkdir(parents=True)
    full_disk = PromptCapture(tmp_path / "taken", share=1, retention_days=30, clock=lambda: NOW)
    full_disk.offer(orders[0], is_allowed=True)
    full_disk.close()
    data = reader.get_metrics_data()
    assert data is not None
    (metric,) = data.resource_metrics[0].scope_metrics[0].metrics
    found = {p.attributes[names.ATTR_CAPTURE_RESULT]: p.value for p in metric.data.data_points}
    assert metric.name == names.CAPTURED_PROMPTS.name
    assert found == {"written": 2, "left_out": 2, "failed": 1}


def test_a_full_disk_costs_the_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "prompts-2026-11-30.jsonl").mkdir()
    kept_before = list(tmp_path.iterdir())
    capture = PromptCapture(tmp_path, share=1, retention_days=30, clock=lambda: NOW)
    capture.offer(_order(TextPrompt("private words")), is_allowed=True)
    capture.close()
    assert capture.counts.num_failed == 1
    assert list(tmp_path.iterdir()) == kept_before
    assert "private words" not in caplog.text
    assert [r.levelno for r in caplog.records].count(logging.ERROR) == 1


def test_it_is_off_unless_folder_and_share_are_given() -> None:
    assert ServiceSettings().capture_folder is None
    for wrong in (
        {"capture_folder": "x"},
        {"capture_share": 0.1},
        {"capture_redaction": "a:b"},
    ):
        with pytest.raises(ValidationError, match="capture_"):
            ServiceSettings(**wrong)


def test_a_tenant_opts_out_in_the_access_file(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text("[tenants.a]\ncapture = false\n[tenants.b]\n")
    principals = read_access_file(path).principals
    assert not principals["a"].may_be_captured
    assert principals["b"].may_be_captured
    path.write_text('[tenants.a]\ncapture = "no"\n')
    with pytest.raises(AccessFileError, match=r"tenants\.a\.capture: must be true or false"):
        read_access_file(path)


def test_old_files_go_when_no_prompt_comes_and_a_strange_name_harms_nothing(
    tmp_path: Path,
) -> None:
    today = [NOW]
    (tmp_path / "prompts-2026-13-40.jsonl").write_text("somebody else's")
    old = tmp_path / "prompts-2026-11-29.jsonl"
    old.write_text("{}")
    capture = PromptCapture(
        tmp_path, share=1, retention_days=1, clock=lambda: today[0], check_seconds=0.01
    )
    today[0] = NOW + timedelta(days=2)
    deadline = time.monotonic() + 30
    while old.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not old.exists()
    capture.offer(_order(TextPrompt("still kept")), is_allowed=True)
    capture.close()
    assert capture.counts.num_written == 1
    assert (tmp_path / "prompts-2026-13-40.jsonl").exists()


def test_half_a_line_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("service.capture.os.write", lambda file, line: write(file, line[:3]))
    capture = PromptCapture(tmp_path, share=1, retention_days=30, clock=lambda: NOW)
    capture.offer(_order(TextPrompt("one")), is_allowed=True)
    capture.close()
    assert (capture.counts.num_written, capture.counts.num_failed) == (0, 1)
