"""From the settings to a recorder of what the server does."""

import importlib.metadata
import logging
from dataclasses import replace
from pathlib import Path

from engine.stats import ModelInfo
from service.settings import ServiceSettings
from telemetry.assembly import RecorderConfig, open_recorder
from telemetry.ledger.journal import JournalLockedError
from telemetry.otel import OtelConfig, Telemetry, start_telemetry
from telemetry.prices import PriceSchedule, fixed_price, read_price_book, schedule_of
from telemetry.pseudonym import load_or_create_key
from telemetry.recording import Recording

_MAX_JOURNALS = 64  # servers of one home on one machine

_log = logging.getLogger(__name__)


def version() -> str:
    return importlib.metadata.version("tandem")


def ledger_url(settings: ServiceSettings) -> str:
    """The configured ledger, or the SQLite file of the home folder."""
    return settings.ledger_url or f"sqlite:///{settings.home.expanduser() / 'ledger.db'}"


def prices(settings: ServiceSettings) -> PriceSchedule:
    """Raises PriceBookError, a ValueError, for a book that cannot be used."""
    if settings.price_book is None:
        return fixed_price(str(settings.price_per_hour_usd))
    book = read_price_book(settings.price_book)
    return schedule_of(book, settings.machine_type, settings.purchase)


def reload_prices(settings: ServiceSettings, recording: Recording | None) -> None:
    """Read the price book again. Raises PriceBookError, a ValueError, or OSError."""
    schedule = prices(settings)
    if recording is not None and settings.price_book is not None:
        recording.reprice(schedule)


def open_telemetry(settings: ServiceSettings, instance_id: str) -> Telemetry:
    """Start the exporters that are configured. Raises OSError when a port is taken."""
    telemetry = start_telemetry(
        OtelConfig(
            otlp_endpoint=settings.otlp_endpoint,
            prometheus_port=settings.prometheus_port,
            prometheus_host=settings.prometheus_host,
            trace_sample_ratio=settings.trace_sample_ratio,
            service_version=version(),
            instance_id=instance_id,
        )
    )
    telemetry.install()
    return telemetry


def open_recording(
    settings: ServiceSettings,
    info: ModelInfo,
    model_name: str,
    telemetry: Telemetry,
    instance_id: str,
) -> Recording:
    """Start the ledger, which knows the model by the name that clients use.

    Every server on this machine has a journal of its own: the first one that no other holds.
    Raises OSError, JournalError or ValueError.
    """
    home = settings.home.expanduser()
    config = RecorderConfig(
        ledger_url=ledger_url(settings),
        journal_folder=home / "journal" / "0",
        prices=prices(settings),
        version=version(),
        instance_id=instance_id,
        tenant_key=load_or_create_key(home / "tenant.key"),
        step_span_every=settings.step_span_every if telemetry.is_tracing else 0,
    )
    named = replace(info, name=model_name)
    return _first_free(config, named, telemetry, home / "journal")


def _first_free(
    config: RecorderConfig, info: ModelInfo, telemetry: Telemetry, journals: Path
) -> Recording:
    for index in range(_MAX_JOURNALS - 1):
        folder = journals / str(index)
        try:
            return open_recorder(replace(config, journal_folder=folder), info, telemetry)
        except JournalLockedError:
            _log.debug("%s belongs to another server", folder)
    last = journals / str(_MAX_JOURNALS - 1)
    return open_recorder(replace(config, journal_folder=last), info, telemetry)
