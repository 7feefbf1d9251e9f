"""`tandem drafter`: look into heads, translate them, measure them, and choose the one in use."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from service.models import ModelError, default_home, resolve_model

if TYPE_CHECKING:  # it loads torch
    from engine.drafter.registry import HeadRegistry
    from engine.loader import LoadedModel

EXIT_PROBLEM = 1

app = typer.Typer(help="Inspect, translate and register drafting heads.", no_args_is_help=True)

Head = Annotated[Path, typer.Argument(help="A head's folder.", exists=True, file_okay=False)]
Target = Annotated[str, typer.Option(help="A name of `tandem models list`, a folder or hub id.")]
Name = Annotated[str, typer.Argument(help="A name in the registry.")]
Registry = Annotated[
    Path | None,
    typer.Option(
        envvar="TANDEM_REGISTRY", help="The registry.", show_default="~/.cache/tandem/registry"
    ),
]
DEFAULT_TARGET = "smollm2-135m-instruct"


@app.command()
def inspect(
    head: Head,
    target: Annotated[
        str | None, typer.Option(help="Compare with this target; without, the folder alone.")
    ] = None,
) -> None:
    """Print a head's card and every mismatch; exit code 1 when it cannot be loaded."""
    from engine.drafter.head.files import read_card
    from engine.drafter.head.inspection import mismatches

    with _failures_told():
        loaded = None if target is None else _load(target)
        card = read_card(head)
        found = mismatches(head, loaded)
    typer.echo(json.dumps(card, indent=2))
    for mismatch in found:
        word = "refused" if mismatch.is_fatal else "drafts badly?"
        typer.echo(f"{word}  {mismatch.field}: {mismatch.reason}")
    if not found:
        typer.echo("no mismatch")
    if any(mismatch.is_fatal for mismatch in found):
        raise typer.Exit(EXIT_PROBLEM)


@app.command("import")
def import_command(
    source: Annotated[Path, typer.Argument(help="A head of another program.", exists=True)],
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    target: Target = DEFAULT_TARGET,
    undo_rope_scaling: Annotated[
        bool, typer.Option(help="Take YaRN and the like as added by the export.")
    ] = False,
) -> None:
    """Translate a head of EAGLE, SpecForge, NVIDIA, NeMo or speculators into our format."""
    from engine.drafter.head.export import export_head
    from engine.drafter.head.importing import import_head

    with _failures_told():
        loaded = _load(target)
        found = import_head(source, loaded, undo_rope_scaling=undo_rope_scaling)
        card = {
            "target_fingerprint": loaded.fingerprint,
            "imported_from": found.dialect,
            "notes": list(found.notes),
        }
        export_head(found.head, card, out, loaded, "speculators")
    for note in found.notes:
        typer.echo(note, err=True)
    typer.echo(out)


@app.command()
def export(
    head: Head,
    out: Annotated[Path, typer.Argument(help="A folder that does not exist yet.")],
    to: Annotated[str, typer.Option(help="speculators (vLLM) or eagle (SGLang).")] = "speculators",
    target: Target = DEFAULT_TARGET,
    target_name: Annotated[
        str | None, typer.Option(help="What the file calls the target, for another machine.")
    ] = None,
) -> None:
    """Write a head for another program; it is read again and compared."""
    from engine.drafter.head.export import FORMATS, export_head
    from engine.drafter.head.files import load_head, read_card

    chosen = next((known for known in FORMATS if known == to), None)
    if chosen is None:
        raise typer.BadParameter(f"must be one of {', '.join(FORMATS)}", param_hint="--to")
    with _failures_told():
        loaded = _load(target)
        found = load_head(head, loaded.model, target_fingerprint=loaded.fingerprint)
        export_head(found, read_card(head), out, loaded, chosen, target_name=target_name)
    typer.echo(out)


@app.command()
def probe(
    head: Head,
    target: Target = DEFAULT_TARGET,
    num_texts: Annotated[int, typer.Option(min=1, max=256, help="Texts to measure on.")] = 16,
    num_tokens: Annotated[int, typer.Option(min=8, max=512, help="The target's per text.")] = 64,
    apply: Annotated[
        Path | None, typer.Option(help="Write the best as a head into this new folder.")
    ] = None,
) -> None:
    """Measure the acceptance under other layer ids, rotary bases and norm flags."""
    from engine.drafter.head.export import export_head
    from engine.drafter.head.files import load_head, read_card
    from engine.drafter.head.probe_head import probe as measure
    from engine.drafter.head.probe_head import restated
    from engine.drafter.head.probe_texts import own_texts

    with _failures_told():
        loaded = _load(target, dtype="float32")
        found = load_head(
            head, loaded.model, target_fingerprint=loaded.fingerprint, is_to_be_probed=True
        )
        texts = own_texts(loaded, num_texts=num_texts, num_tokens=num_tokens)
        report = measure(found, loaded, texts)
        for row in sorted(report.measured, key=lambda m: -m.acceptance_length):
            typer.echo(f"{row.acceptance_length:6.3f}  {_changes(row.changes)}")
        if apply is not None:
            card = {**read_card(head), "probed": dict(report.best.changes), "is_slim": False}
            export_head(restated(found, **report.best.changes), card, apply, loaded, "speculators")
            typer.echo(apply)


@app.command()
def register(
    head: Head,
    name: Annotated[str, typer.Option(help="What servers call it.")],
    note: Annotated[str, typer.Option(help="Why it was made.")] = "",
    registry: Registry = None,
) -> None:
    """Copy a head into the registry as the next version of a name; nothing uses it yet."""
    with _failures_told():
        found = _registry(registry).register(head, name, note=note)
    typer.echo(f"{found.name}@{found.version} {found.fingerprint}")


@app.command("list")
def list_command(registry: Registry = None) -> None:
    """Show all names and versions; a star marks the one in use."""
    with _failures_told():
        known = _registry(registry)
        for name in known.names():
            current = known.pointer(name).current
            for version in known.versions(name):
                mark = "*" if version.version == current else " "
                typer.echo(
                    f"{mark} {name}@{version.version} {version.fingerprint} "
                    f"{version.registered_at} {version.note}".rstrip()
                )


@app.command()
def promote(
    name: Annotated[str, typer.Argument(help="NAME@VERSION.")],
    evaluation: Annotated[
        Path | None, typer.Option(help="What `tandem train compare` wrote.", exists=True)
    ] = None,
    candidate: Annotated[str, typer.Option(help="This version there.")] = "candidate",
    production: Annotated[str, typer.Option(help="The version in use there.")] = "production",
    force: Annotated[bool, typer.Option(help="Without proof that it is better.")] = False,
    registry: Registry = None,
) -> None:
    """Make a version the one that NAME stands for.

    Over another version it must have proved itself: significantly longer accepted drafts, and no
    source of conversations that loses.
    """
    plain, has_version, version = name.partition("@")
    if not has_version:
        raise typer.BadParameter("must be NAME@VERSION", param_hint="NAME")
    with _failures_told():
        known = _registry(registry)
        reason: dict[str, Any] = {"forced": True} if force else {}
        current = known.pointer(plain).current
        if current not in (None, version) and not force:
            fingerprints = {
                candidate: known.registration(plain, version).fingerprint,
                production: known.registration(plain, current or "").fingerprint,
            }
            reason = _gate(evaluation, candidate, production, fingerprints)
        pointer = known.promote(plain, version, reason=reason)
    typer.echo(json.dumps(asdict(pointer)))


def _gate(
    evaluation: Path | None, candidate: str, production: str, fingerprints: Mapping[str, str]
) -> dict[str, Any]:
    """Why it may be promoted. Raises GateError why it may not."""
    from engine.drafter.gate import GateError, check_heads, judge_replay

    if evaluation is None:
        raise GateError("evaluation: another version is in use; give --evaluation, or --force")
    found = json.loads(evaluation.read_text())
    check_heads(found, fingerprints)
    verdict = judge_replay(found, candidate, production)
    if not verdict.is_passed:
        raise GateError("; ".join(verdict.objections))
    return asdict(verdict)


@app.command()
def rollback(name: Name, registry: Registry = None) -> None:
    """Go back to the version that was in use before."""
    with _failures_told():
        pointer = _registry(registry).rollback(name)
    typer.echo(json.dumps(asdict(pointer)))


@contextmanager
def _failures_told() -> Iterator[None]:
    try:
        yield
    except (ModelError, ValueError, OSError) as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(EXIT_PROBLEM) from error


def _registry(folder: Path | None) -> "HeadRegistry":
    from engine.drafter.registry import HeadRegistry

    return HeadRegistry((folder or default_home() / "registry").expanduser())


def _load(target: str, dtype: str = "auto") -> "LoadedModel":
    from engine.loader import load_model

    return load_model(resolve_model(target, default_home()), dtype=dtype, device="cpu")


def _changes(changes: object) -> str:
    return json.dumps(changes) if changes else "as it is"
