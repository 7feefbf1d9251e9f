"""The demo's counting, its view, its summary and its reading of the export."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from rich.console import Console

from service.demo.answers import Answer, Round, acceptance_length, acceptance_rate, exact_match
from service.demo.exported import read_exported
from service.demo.prompts import DemoPrompt, load_prompts
from service.demo.server import ServerError, running_server
from service.demo.summary import write_summary
from service.demo.view import StreamView, parquet_table, request_table

PROMPT = DemoPrompt(name="capital", kind="chat", prompt="[b]?", max_tokens=8)
ANSWER = Answer(
    prompt=PROMPT,
    prompt_token_ids=(1, 2),
    token_ids=(5, 6, 7),
    num_draft_tokens=8,
    num_accepted_tokens=2,
    num_verify_steps=4,
    ttft_seconds=0.25,
    tpot_seconds=None,
    cost_nano_usd=1500,
)
PLAIN = replace(ANSWER, num_draft_tokens=0, num_accepted_tokens=0, num_verify_steps=0)


def test_sixteen_prompts_cover_every_kind() -> None:
    prompts = load_prompts()
    assert len(prompts) == 16
    assert len({prompt.name for prompt in prompts}) == 16
    kinds = {prompt.kind for prompt in prompts}
    assert kinds == {"chat", "summary", "code", "translation", "spanish", "chinese"}
    assert max(len(prompt.prompt) for prompt in prompts) > 2000  # a long context among them


def test_ratios_come_from_sums_and_nothing_drafted_is_no_ratio() -> None:
    assert ANSWER.acceptance_rate == 0.25
    assert ANSWER.acceptance_length == 1.5
    other = replace(ANSWER, num_draft_tokens=2, num_accepted_tokens=2, num_verify_steps=1)
    assert acceptance_rate([ANSWER, other, PLAIN]) == 0.4
    assert acceptance_length([ANSWER, other, PLAIN]) == 1.8
    assert PLAIN.acceptance_rate is None
    assert acceptance_length([PLAIN]) is None


@pytest.mark.parametrize("wrong", [(5, 6, 8), (5, 6), (5, 6, 7, 8), ()])
def test_one_token_too_many_too_few_or_different_is_no_match(wrong: tuple[int, ...]) -> None:
    assert exact_match([ANSWER, ANSWER], [(5, 6, 7), [5, 6, 7]]) == 1
    assert exact_match([ANSWER, ANSWER], [(5, 6, 7), wrong]) == 0.5


def test_the_summary_has_the_agreed_keys(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    on, off = Round((ANSWER, ANSWER), 2.0), Round((PLAIN, PLAIN), 4.0)
    write_summary(path, on, off, [(5, 6, 7), (5, 6, 8)], {"fact_request": 4})
    assert json.loads(path.read_text()) == {
        "requests": 2,
        "tokens": 6,
        "exact_match": 0.5,
        "acceptance_length": 1.5,
        "tokens_per_second_on": 3.0,
        "tokens_per_second_off": 1.5,
        "exported_tables": {"fact_request": 4},
    }


@pytest.mark.parametrize("is_terminal", [True, False])
def test_streams_are_shown_with_and_without_a_terminal(is_terminal: bool) -> None:
    console = _console(is_terminal)
    view = StreamView(console, [PROMPT, replace(PROMPT, name="idle")], "streams")
    with view.shown():
        view.delta(0, "text with [brackets] and\nlines", 3)
        view.finished(0)
    shown = _output(console)
    assert "capital" in shown
    assert ("with [brackets] and lines" in shown) == is_terminal
    assert ("idle" in shown) == is_terminal


def test_the_table_marks_the_request_that_differs() -> None:
    console = _console(is_terminal=False)
    console.print(request_table(Round((ANSWER, PLAIN), 2.0), [True, False]))
    shown = _output(console)
    assert "25%" in shown
    assert "250 ms" in shown
    assert "1.5" in shown
    assert "NO" in shown
    assert "1/2" in shown


def test_the_export_is_read_through_its_manifest(tmp_path: Path) -> None:
    parts = {"a/1.parquet": [1, 2], "a/2.parquet": [3], "a/retired.parquet": [9]}
    for name, values in parts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"id": values}), tmp_path / name)
    files = [{"path": "a/1.parquet"}, {"path": "a/2.parquet"}]
    manifest = {"tables": {"a": {"files": files}, "empty": {"files": []}}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    tables = read_exported(tmp_path)
    assert {name: table.column("id").to_pylist() for name, table in tables.items()} == {
        "a": [1, 2, 3]
    }
    console = _console(is_terminal=False)
    console.print(parquet_table("a", tables["a"]))
    assert "3 rows" in _output(console)


def test_a_server_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match="dtype"),
        running_server(tmp_path / "log", {"TANDEM_DTYPE": "float3"}),
    ):
        pytest.fail("the block must not run")


def _console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, color_system=None)


def _output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
