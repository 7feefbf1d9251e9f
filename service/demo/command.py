"""`tandem demo`: the main job on a real model, with every token checked."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

_FILE_WIDTH = 100


def demo(
    target: Annotated[
        str, typer.Option(help="A name of `tandem models list`, a folder or a hub id.")
    ] = "smollm2-135m-instruct",
    out: Annotated[Path, typer.Option(help="Emptied, then filled.")] = Path("build/demo"),
    max_tokens: Annotated[int, typer.Option(min=2, help="Bounds every answer.")] = 1024,
) -> None:
    """Serve a model, stream 16 prompts to it, and compare every token with the target alone.

    Fails when a token differs.
    """
    from service.client_calls import TandemError
    from service.demo.run import DemoError, DemoSettings, run_demo
    from service.demo.server import ServerError
    from service.models import ModelError

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    settings = DemoSettings(target=target, folder=out, max_tokens=max_tokens)
    try:
        is_equal = run_demo(settings, _console())
    except (DemoError, ServerError, ModelError, TandemError, OSError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error
    if not is_equal:
        raise typer.Exit(1)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console
