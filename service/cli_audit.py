"""`tandem audit`: look at requests that diverged from the target, and decode them again."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # it loads torch
    from engine.audit import AuditFinding
    from engine.audit_case import AuditCase
    from engine.audit_replay import AuditReplay

EXIT_PROBLEM = 1
_CONTEXT_TOKENS = 6

app = typer.Typer(help="Look at requests that diverged from the target.", no_args_is_help=True)

Cases = Annotated[
    Path | None,
    typer.Option(
        envvar="TANDEM_AUDIT_CASES", help="The folder in which the server keeps divergences."
    ),
]


@app.command("list")
def list_cases(cases: Cases = None) -> None:
    """Print the request ids of the kept divergences, the newest first."""
    from engine.audit_case import AuditCaseError, read_case

    folder = _folder(cases)
    for path in sorted(folder.glob("*.json"), key=os.path.getmtime, reverse=True):
        try:
            case = read_case(path)
        except AuditCaseError as error:
            typer.secho(str(error), err=True, fg="red")
            continue
        typer.echo(f"{case.job.request.request_id}  at token {case.first_mismatch_index}")


@app.command()
def replay(
    request: Annotated[str, typer.Argument(help="A request id, or the path of a case.")],
    cases: Cases = None,
    target: Annotated[str | None, typer.Option(help="The model; by default the server's.")] = None,
) -> None:
    """Decode a request that diverged again, with speculation and without, and show both.

    Exit code 0 when neither diverges any more, 1 when one does or the case cannot be decoded.
    """
    from engine.audit_case import AuditCaseError, case_path, read_case

    try:
        path = Path(request)
        case = read_case(path if path.is_file() else case_path(_folder(cases), request))
        found = _decode_again(case, target)
    except (AuditCaseError, ValueError) as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(EXIT_PROBLEM) from error
    if not _show(case, found):
        raise typer.Exit(EXIT_PROBLEM)


def _folder(cases: Path | None) -> Path:
    if cases is None:
        typer.secho("--cases or TANDEM_AUDIT_CASES must name the folder", err=True, fg="red")
        raise typer.Exit(2)
    return cases.expanduser()


def _decode_again(case: "AuditCase", target: str | None) -> "AuditReplay":
    from transformers.utils.logging import disable_progress_bar

    from engine import audit_replay
    from engine.engine import Engine
    from service.models import resolve_model
    from service.settings import ServiceSettings

    disable_progress_bar()
    as_served = {
        "dtype": case.dtype,
        "layout": case.layout,
        "quantization": case.quantization,
    }
    settings = ServiceSettings().model_copy(update=as_served)
    home = settings.home.expanduser()
    draft = None if settings.draft is None else resolve_model(settings.draft, home)
    config = settings.engine_config(resolve_model(target or settings.target, home), draft)
    return audit_replay.replay(Engine.from_config(config), case)


def _show(case: "AuditCase", found: "AuditReplay") -> bool:
    """Print the three outputs around the first difference; whether none diverges any more."""
    index = case.first_mismatch_index
    margin = "infinite" if case.first_margin is None else f"{case.first_margin:.3g}"
    request_id, drafter = case.job.request.request_id, case.job.drafter or "none"
    if case.expected_token_id is not None:
        typer.echo(
            f"{request_id}: token {index} should have been {case.expected_token_id}; "
            f"margin {margin}, limit {case.epsilon:.3g}, drafter {drafter}"
        )
    if case.wrong_ending:
        typer.echo(f"{request_id}: its end is wrong: {case.wrong_ending}; drafter {drafter}")
    rows: Sequence[tuple[str, Sequence[int], AuditFinding]] = (
        ("as served", case.job.output_token_ids, found.recorded),
        ("speculative", found.speculative_token_ids, found.speculative),
        ("plain", found.plain_token_ids, found.plain),
    )
    first = max(0, index - _CONTEXT_TOKENS)
    for name, token_ids, finding in rows:
        shown = " ".join(str(t) for t in token_ids[first : index + _CONTEXT_TOKENS])
        typer.echo(f"{name:12}  {finding.verdict:12}  tokens {first}..: {shown}")
    return all(finding.verdict != "divergence" for _, _, finding in rows[1:])
