"""How a training command ends: refusals and signals as one line and an exit code."""

import signal
from types import FrameType
from typing import Any

import typer

from service.models import ModelError


class _Terminated(BaseException):
    """SIGTERM outside of training proper, which has a handler of its own."""


def _terminate(number: int, frame: FrameType | None) -> None:
    raise _Terminated


class friendly:  # noqa: N801 - used as a statement
    """Turns refusals and SIGTERM into one line on standard error and an exit code."""

    def __enter__(self) -> None:
        # A container's first process is not ended by a signal that it does not handle.
        self._previous = signal.signal(signal.SIGTERM, _terminate)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        if error is None:
            return
        from engine.training.errors import EXIT_STOPPED, StoppedError, TrainingError

        if isinstance(error, StoppedError | _Terminated):
            typer.echo("stopped; run the same command again to go on", err=True)
            raise typer.Exit(EXIT_STOPPED) from error
        if isinstance(error, TrainingError | ModelError | ValueError | OSError):
            typer.echo(f"tandem train: {error}", err=True)
            raise typer.Exit(2) from error
