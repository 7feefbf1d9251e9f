"""`tandem models`: fetch and list the models that Tandem knows by name."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from service.models import ModelError, default_home, list_models, pull

app = typer.Typer(no_args_is_help=True, help="Fetch and list models.")

Home = Annotated[
    Path | None,
    typer.Option(
        envvar="TANDEM_HOME", help="Where models are kept.", show_default="~/.cache/tandem"
    ),
]


@app.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A name that `tandem models list` shows.")],
    home: Home = None,
) -> None:
    """Fetch a model; pulling it again only checks what is there."""
    try:
        path = pull(name, home or default_home(), partial(typer.echo, err=True))
    except ModelError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error
    typer.echo(path)


@app.command("list")
def list_command(home: Home = None) -> None:
    """Show the models that can be pulled, and which are here."""
    table = Table("name", "here", "size", "licence", "description")
    for model in list_models(home or default_home()):
        size = f"{model.num_bytes / 1e6:.0f} MB" if model.is_pulled else "-"
        here = "yes" if model.is_pulled else "no"
        table.add_row(model.name, here, size, model.license, model.description)
    Console().print(table)
