"""`tandem report`: an export as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from exports.errors import ExportError
from exports.report.page import write_report


def report(
    export: Annotated[Path, typer.Argument(help="The folder of an export.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write.", show_default="DIR/report.html")
    ] = None,
) -> None:
    """Show an export in one self-contained HTML page: the charts of the Power BI report."""
    path = out or export / "report.html"
    try:
        write_report(export, path)
    except ExportError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(error.exit_code) from error
    except ModuleNotFoundError as error:
        typer.secho(f"error: {error}; install tandem[report]", err=True, fg="red")
        raise typer.Exit(1) from error
    typer.echo(path)
