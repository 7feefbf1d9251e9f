"""`tandem serve`: a server until a signal ends it."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from service.settings import ServiceSettings


def serve(
    target: Annotated[
        str | None, typer.Option(help="A name of `tandem models list`, a folder or a hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="A draft model, named likewise.")] = None,
    head: Annotated[str | None, typer.Option(help="Folder of a head, for its target.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    max_num_rows: Annotated[int | None, typer.Option(help="Requests that run at once.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    allow_insecure: Annotated[
        bool | None, typer.Option(help="Plain text beyond this machine.")
    ] = None,
    reflection: Annotated[bool | None, typer.Option(help="Let clients read the contract.")] = None,
    list_settings: Annotated[
        bool, typer.Option("--settings", help="List every setting and its default.")
    ] = False,
) -> None:
    """Serve a model over gRPC until SIGTERM.

    Every setting can be given as an environment variable TANDEM_NAME as well; see
    `tandem serve --settings` for all of them.
    """
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name != "list_settings"
    }
    if list_settings:
        show_settings()
        return
    settings = read_settings(given)
    raise typer.Exit(run(settings))


def show_settings() -> None:
    """Names, defaults and types, as environment variables."""
    for name, info in ServiceSettings.model_fields.items():
        kind = getattr(info.annotation, "__name__", str(info.annotation))
        typer.echo(
            f"TANDEM_{name.upper()}={'' if info.default is None else info.default}  ({kind})"
        )


def read_settings(given: dict[str, Any]) -> ServiceSettings:
    """Arguments over environment. Ends the program, naming the setting, when one is wrong."""
    try:
        return ServiceSettings(**given)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            typer.secho(f"error: {name or 'settings'}: {problem['msg']}", err=True, fg="red")
        raise typer.Exit(2) from error


def run(settings: ServiceSettings) -> int:
    """Serve until a signal; the exit status. Imports torch."""
    from service.assembly import SetUpError, assemble, set_up_logs
    from service.file_watch import watch_of
    from service.models import ModelError
    from service.process import run_until_signal
    from service.shard import rank_of, serve_shard

    set_up_logs(settings)

    async def main() -> int:
        server = assemble(settings)
        return await run_until_signal(
            server,
            settings.grace_seconds,
            lambda ready: typer.echo(f"serving on {settings.host}:{ready.port}", err=True),
            watch_of(settings, server.reload),
        )

    try:
        if rank_of(settings) > 0:
            return serve_shard(settings)
        return asyncio.run(main())
    except (SetUpError, ModelError, OSError, ValueError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        sys.stderr.flush()
        return 1
