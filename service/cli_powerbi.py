"""`tandem powerbi`: a Power BI project that reads an export."""

from pathlib import Path
from typing import Annotated

import typer

from exports.errors import ExportError
from exports.powerbi.project import default_source, write_project
from exports.powerbi.queries import Source
from exports.powerbi.views import views_sql

app = typer.Typer(no_args_is_help=True, help="A Power BI project that reads an export.")


@app.callback()
def _powerbi() -> None:
    pass


@app.command("views")
def views() -> None:
    """Print the SQL of the views that DirectQuery reads: tandem powerbi views | psql ledger."""
    typer.echo(views_sql(), nl=False)


@app.command("init")
def init(
    root: Annotated[
        str,
        typer.Option(
            help="The export: a folder as Power BI sees it, or its ADLS address. "
            "Or a ledger with views: postgresql://HOST:PORT/DATABASE."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where to write the project.")] = Path("powerbi"),
    source: Annotated[
        Source | None,
        typer.Option(help="What the root is.", show_default="by the root"),
    ] = None,
) -> None:
    """Write a copy of the project, bound to one export. Nothing is ever overwritten."""
    try:
        pbip = write_project(out, root, source or default_source(root))
    except ExportError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(error.exit_code) from error
    typer.echo(f"{pbip}: open it in Power BI Desktop and refresh")
