"""The command `tandem`. Each command is imported when it is used: export never loads torch."""

import importlib
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

_COMMANDS = {  # name -> module and its typer app, or function
    "serve": ("service.cli_serve", "serve"),
    "generate": ("service.cli_generate", "generate"),
    "demo": ("service.demo.command", "demo"),
    "models": ("service.cli_models", "app"),
    "export": ("service.cli_export", "app"),
    "report": ("service.cli_report", "report"),
    "powerbi": ("service.cli_powerbi", "app"),
    "ledger": ("service.cli_ledger", "app"),
    "audit": ("service.cli_audit", "app"),
    "drafter": ("service.cli_drafter", "app"),
    "experiment": ("service.cli_experiment", "app"),
    "train": ("service.cli_train", "app"),
}


class _LazyGroup(TyperGroup):
    """Knows its commands by name and imports them on demand."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (module, _) in _COMMANDS.items() if find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, attribute = _COMMANDS[cmd_name]
        target = getattr(importlib.import_module(module), attribute)
        if not isinstance(target, typer.Typer):
            single = typer.Typer(add_completion=False)
            single.command(cmd_name)(target)
            target = single
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    help="LLM inference over gRPC with speculative decoding that does not change the output.",
)


@app.callback()
def _tandem() -> None:
    pass


def main() -> None:
    """Entry point of the command line."""
    app()
