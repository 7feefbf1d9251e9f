"""From the settings to a server's heads and its experiment."""

from engine.config import HeadSource
from engine.drafter.registry import HeadRegistry
from service.experiments.live import LiveExperiments
from service.experiments.records import RollbackStore
from service.experiments.watch import ExperimentWatch
from service.recording import ledger_url
from service.settings import ServiceSettings
from telemetry.ledger.session import open_ledger


def registry(settings: ServiceSettings) -> HeadRegistry:
    return HeadRegistry((settings.registry or settings.home / "registry").expanduser())


def find_heads(settings: ServiceSettings) -> tuple[HeadSource, ...]:
    """The folders of the heads that shall be loaded. Raises RegistryError."""
    found = registry(settings)
    sources = []
    for reference in settings.heads:
        head = found.resolve(reference)
        sources.append(HeadSource(reference, str(found.folder_of(head.name, head.version))))
    return tuple(sources)


def open_experiments(settings: ServiceSettings) -> LiveExperiments:
    """Nothing is read before the drafters are known."""
    store = RollbackStore(settings.home.expanduser() / "experiments")
    return LiveExperiments(settings.experiment_file, store, settings.max_draft_tokens)


def open_watch(settings: ServiceSettings, experiments: LiveExperiments) -> ExperimentWatch | None:
    if settings.experiment_file is None:
        return None
    return ExperimentWatch(
        experiments,
        lambda: open_ledger(ledger_url(settings), read_only=True),
        max_draft_tokens=settings.max_draft_tokens,
        interval_seconds=settings.experiment_check_seconds,
    )
