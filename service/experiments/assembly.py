"""From the settings to a server's heads and its experiment."""

from functools import partial

from engine.drafter.registry import HeadRegistry
from service.experiments.heads import RegisteredHeads, reference_of
from service.experiments.live import LiveExperiments
from service.experiments.promotion import promote_candidate
from service.experiments.records import RollbackStore
from service.experiments.watch import ExperimentWatch
from service.recording import ledger_url
from service.settings import ServiceSettings
from telemetry.ledger.session import open_ledger


def registry(settings: ServiceSettings) -> HeadRegistry:
    return HeadRegistry((settings.registry or settings.home / "registry").expanduser())


def registered_heads(settings: ServiceSettings) -> RegisteredHeads:
    """Raises RegistryError for a head that is configured and not there."""
    default = settings.drafters if any(map(reference_of, settings.drafters)) else None
    heads = RegisteredHeads(registry(settings), settings.heads, default)
    heads.wanted()
    return heads


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
        promote=partial(promote_candidate, registry(settings)),
    )
