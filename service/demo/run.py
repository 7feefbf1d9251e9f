"""The main job from end to end: serve, stream, verify, export, show."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow
from rich.console import Console
from rich.progress import Progress

from service.demo.answers import Round, exact_match
from service.demo.exported import read_exported
from service.demo.prompts import DemoPrompt, load_prompts
from service.demo.reference import decode_alone
from service.demo.server import running_server
from service.demo.streams import send_all
from service.demo.summary import write_summary
from service.demo.view import StreamView, parquet_table, request_table
from service.models import CATALOGUE, default_home, pull, resolve_model

NUM_STREAMS = 8
_SHOWN_TABLES = ("fact_request", "dim_model", "dim_date")
_NEXT = """What to try next
  tandem serve                        the same server, to stay
  tandem generate "Tell me a joke."   stream to this terminal
  tandem export --out build/tables    the ledger as Parquet, for Power BI
  tandem serve --target MODEL         your own model: a folder or a hub id
The commands are in .venv/bin; README.md has the rest."""


class DemoError(RuntimeError):
    """A part of the demo failed; the message says which and what it printed."""


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """target: what the server loads. folder: emptied, then filled with what the demo makes.

    max_tokens: bounds what each prompt asks for.
    """

    target: str
    folder: Path
    max_tokens: int


def run_demo(settings: DemoSettings, console: Console) -> bool:
    """Run the demo; True when every token equals the target alone.

    Raises DemoError, ServerError, ModelError, TandemError or OSError when a part of it fails.
    """
    shutil.rmtree(settings.folder, ignore_errors=True)
    settings.folder.mkdir(parents=True)
    prompts = load_prompts()
    target = _fetch(settings.target, console)
    ledger_url = f"sqlite:///{(settings.folder / 'ledger.sqlite').resolve()}"
    on, off = _serve(settings, prompts, ledger_url, console)
    references = _decode_alone(target, on, console)
    is_equal = [a.token_ids == r for a, r in zip(on.answers, references, strict=True)]
    console.print(request_table(on, is_equal))
    tables = _export(settings.folder, ledger_url)
    for name in _SHOWN_TABLES:
        if name in tables:
            console.print(parquet_table(name, tables[name]))
    num_rows = {name: table.num_rows for name, table in tables.items()}
    console.print("exported:", ", ".join(f"{name} {n}" for name, n in num_rows.items()))
    path = settings.folder / "summary.json"
    write_summary(path, on, off, references, num_rows)
    _conclude(console, on, off, references, path)
    return all(is_equal)


def _fetch(target: str, console: Console) -> str:
    home = default_home()
    if target in CATALOGUE:
        pull(target, home, lambda message: console.print(message, highlight=False))
    return resolve_model(target, home)


def _serve(
    settings: DemoSettings, prompts: tuple[DemoPrompt, ...], ledger_url: str, console: Console
) -> tuple[Round, Round]:
    environ = {
        "TANDEM_TARGET": settings.target,
        "TANDEM_DTYPE": "float32",  # the precision in which transformers decodes for the proof
        "TANDEM_LEDGER_URL": ledger_url,
    }
    console.print("starting the server, float32")
    with running_server(settings.folder / "server.log", environ) as address:
        console.print(f"serving on {address}", highlight=False)

        def send(title: str, speculation: bool | None, max_tokens: int) -> Round:
            view = StreamView(console, prompts, title)
            chosen = [replace(p, max_tokens=min(p.max_tokens, max_tokens)) for p in prompts]
            with view.shown():
                return asyncio.run(send_all(address, chosen, NUM_STREAMS, speculation, view))

        # What the server keeps of a prompt speeds up the next time it comes: the first pass
        # gives both measured ones the same start.
        send("warm-up, one token each", None, max_tokens=1)
        off = send("speculation off: the target decodes every token", False, settings.max_tokens)
        on = send("speculation on: drafts, verified by the target", None, settings.max_tokens)
    return on, off


def _decode_alone(target: str, on: Round, console: Console) -> tuple[tuple[int, ...], ...]:
    title = "transformers' generate, target alone"
    if not console.is_terminal:
        console.print(title)
        return decode_alone(target, on.answers, lambda num_done: None)
    with Progress(console=console) as progress:
        task = progress.add_task(title, total=len(on.answers))
        return decode_alone(
            target, on.answers, lambda num_done: progress.update(task, completed=num_done)
        )


def _export(folder: Path, ledger_url: str) -> Mapping[str, pyarrow.Table]:
    out = folder / "tables"
    tandem = Path(sys.executable).with_name("tandem")
    result = subprocess.run(  # noqa: S603  # our own command
        [tandem, "export", "--out", out],
        env={**os.environ, "TANDEM_LEDGER_URL": ledger_url},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise DemoError(f"tandem export failed:\n{result.stderr}")
    return read_exported(out)


def _conclude(
    console: Console, on: Round, off: Round, references: tuple[tuple[int, ...], ...], path: Path
) -> None:
    share = exact_match(on.answers, references)
    verdict = "[bold green]every token is equal[/]" if share == 1 else "[bold red]DIFFERENT[/]"
    console.print(f"target alone against speculation: {share:.0%} of the sequences, {verdict}")
    console.print(
        f"{on.tokens_per_second:.1f} tokens/s with speculation, {off.tokens_per_second:.1f} without"
    )
    console.print(f"written: {path}")
    console.print()
    console.print(_NEXT, highlight=False, markup=False)
