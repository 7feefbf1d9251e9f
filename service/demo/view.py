"""What the demo shows: streams while they run, and tables. Also when stdout is no terminal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow
from rich import box
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from service.demo.answers import Answer, Round, acceptance_length, acceptance_rate
from service.demo.prompts import DemoPrompt

_TAIL_CHARACTERS = 200  # more than a line holds; the table cuts it
_MAX_COLUMNS = 6
_MAX_ROWS = 5
_PREFERRED_COLUMNS = (
    "num_prompt_tokens",
    "num_output_tokens",
    "num_draft_tokens",
    "num_accepted_tokens",
    "ttft_seconds",
    "cost_nano_usd",
)


@dataclass(slots=True)
class _Stream:
    prompt: DemoPrompt
    state: str = "waiting"
    num_tokens: int = 0
    tail: str = ""


class StreamView:
    """The state of all streams of a round, drawn ten times a second on a terminal.

    Without a terminal a line is printed for every finished stream instead.
    """

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt], title: str) -> None:
        self._console = console
        self._title = title
        self._streams = [_Stream(prompt) for prompt in prompts]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Draw until the block ends; the last picture stays."""
        if not self._console.is_terminal:
            self._console.print(self._title)
            yield
            return
        with Live(get_renderable=self._table, console=self._console, refresh_per_second=10) as live:
            yield
            live.refresh()

    def delta(self, index: int, text: str, num_tokens: int) -> None:
        """Text and tokens that one message brought."""
        stream = self._streams[index]
        stream.state = "streaming"
        stream.num_tokens += num_tokens
        stream.tail = (stream.tail + text)[-_TAIL_CHARACTERS:]

    def finished(self, index: int) -> None:
        """The stream ended well."""
        stream = self._streams[index]
        stream.state = "finished"
        if not self._console.is_terminal:
            self._console.print(
                f"  {stream.prompt.name}: {stream.num_tokens} tokens", markup=False, highlight=False
            )

    def _table(self) -> Table:
        width = max(20, self._console.width - 44)
        table = Table("stream", "state", "tokens", "text", title=self._title, expand=True)
        table.columns[2].justify = "right"
        for column in table.columns:
            column.no_wrap = True
        for stream in self._streams:
            tail = " ".join(stream.tail.split())[-width:]
            style = {"waiting": "dim", "finished": "green"}.get(stream.state, "bold")
            table.add_row(
                stream.prompt.name,
                f"[{style}]{stream.state}[/]",
                str(stream.num_tokens),
                escape(tail),
            )
        return table


def request_table(done: Round, is_equal: Sequence[bool]) -> Table:
    """One row per request and one for all of them."""
    table = _compact(Table(title="Requests, speculation on", show_footer=True))
    totals = done.answers
    cost = [a.cost_nano_usd for a in totals if a.cost_nano_usd is not None]
    table.add_column("request", "all")
    for header, footer in (
        ("prompt", str(sum(len(a.prompt_token_ids) for a in totals))),
        ("tokens", str(done.num_tokens)),
        ("accepted", _percent(acceptance_rate(totals))),
        ("length", _number(acceptance_length(totals))),
        ("TTFT", ""),
        ("TPOT", ""),
        ("cost", _micro_usd(sum(cost) if cost else None)),
        ("equal", f"{sum(is_equal)}/{len(is_equal)}"),
    ):
        table.add_column(header, footer, justify="right", no_wrap=True)
    for answer, equal in zip(totals, is_equal, strict=True):
        table.add_row(*_request_cells(answer), "[green]yes[/]" if equal else "[red]NO[/]")
    table.caption = (
        "accepted: share of the drafted tokens. length: tokens per verification, bonus included. "
        "TTFT: the prompt was computed in the warm-up. cost: millionths of a US dollar. "
        "equal: to the target alone."
    )
    return table


def parquet_table(name: str, rows: pyarrow.Table) -> Table:
    """The last rows of an exported table, and some of its columns."""
    title = f"{name}: {rows.num_rows} rows, {rows.num_columns} columns"
    table = _compact(Table(title=title, min_width=len(title) + 4))
    known = [column for column in _PREFERRED_COLUMNS if column in rows.column_names]
    columns = known or rows.column_names[:_MAX_COLUMNS]
    for column in columns:
        table.add_column(column, overflow="fold")
    if rows.num_rows > _MAX_ROWS:
        table.add_row(*("..." for _ in columns))
    for row in rows.slice(max(0, rows.num_rows - _MAX_ROWS)).to_pylist():
        table.add_row(*(escape(_cell(row[column])) for column in columns))
    return table


def _compact(table: Table) -> Table:
    table.box = box.SIMPLE_HEAD
    table.pad_edge = False
    table.collapse_padding = True
    table.title_justify = table.caption_justify = "left"
    return table


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _request_cells(answer: Answer) -> tuple[str, ...]:
    return (
        answer.prompt.name,
        str(len(answer.prompt_token_ids)),
        str(len(answer.token_ids)),
        _percent(answer.acceptance_rate),
        _number(answer.acceptance_length),
        _milliseconds(answer.ttft_seconds),
        _milliseconds(answer.tpot_seconds),
        _micro_usd(answer.cost_nano_usd),
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


def _micro_usd(nano_usd: int | None) -> str:
    return "-" if nano_usd is None else f"{nano_usd / 1000:.1f}"
