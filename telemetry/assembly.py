"""Puts a recorder together from its configuration: the one call that a server makes.

telemetry = start_telemetry(OtelConfig(otlp_endpoint=...)); telemetry.install()
recording = open_recorder(RecorderConfig(...), model_info, telemetry)
...
recording.close(); telemetry.close()
"""

import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from engine.stats import ModelInfo
from telemetry.accounting import Accounting
from telemetry.clock import AnchoredClock
from telemetry.cost import CostMeter
from telemetry.energy import EnergyMeter, find_energy_source
from telemetry.ledger.journal import Journal
from telemetry.ledger.records import InstanceRecord, ModelRecord
from telemetry.ledger.recovery import close_orphans
from telemetry.ledger.session import migrate, open_ledger
from telemetry.ledger.store import LedgerStore
from telemetry.ledger.writer import LedgerWriter
from telemetry.ledger.writer_status import WriterConfig
from telemetry.metrics import Metrics
from telemetry.otel import Telemetry
from telemetry.prices import PriceSchedule
from telemetry.pseudonym import TenantKey, load_or_create_key
from telemetry.recorder import Recorder

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """What a server decides about its records.

    ledger_url: `sqlite:///path` or `postgresql://...`; a database that is away at the start is
      migrated and filled once it answers.
    journal_folder: a local folder of this server's own, on a disk that survives a restart; it
      also holds the node's id and, unless `tenant_key` is given, the key of the pseudonyms.
    step_span_every: write a span for every n-th engine step; 0 writes none.
    """

    ledger_url: str
    journal_folder: Path
    prices: PriceSchedule
    version: str = ""
    instance_id: str = ""  # of this start of the server; empty: a new one
    tenant_key: TenantKey | None = None
    drafter_fingerprints: Mapping[str, str] = field(default_factory=dict)
    journal_max_bytes: int = 1 << 30
    capacity_interval_seconds: float = 60.0
    step_span_every: int = 0
    writer: WriterConfig = field(default_factory=WriterConfig)


def open_recorder(config: RecorderConfig, info: ModelInfo, telemetry: Telemetry) -> Recorder:
    """Start recording for one loaded model.

    Raises JournalError when another server holds the journal's folder, OSError when it cannot
    be written, ValueError for a URL or a key file that is none. Never waits for the database.
    """
    journal = Journal(config.journal_folder, max_bytes=config.journal_max_bytes)
    engine = open_ledger(config.ledger_url)
    tenant_key = config.tenant_key or load_or_create_key(config.journal_folder / "tenant.key")
    clock = AnchoredClock()
    started = clock.now_nanoseconds()
    model = model_record(info)
    instance = InstanceRecord(
        instance_id=config.instance_id or uuid4().hex,
        node=journal.node,
        hostname=socket.gethostname()[:256],
        version=config.version,
        started_at=clock.utc(started),
        last_seen_at=clock.utc(started),
    )
    store = LedgerStore(engine)

    def prepare() -> None:
        closed = close_orphans(engine, store, node=instance.node, instance_id=instance.instance_id)
        if closed:
            _log.warning("closed %d requests that a killed server had left open", closed)

    writer = LedgerWriter(
        store,
        journal,
        config.writer,
        migrate=lambda: migrate(config.ledger_url),
        prepare=prepare,
    )
    source = find_energy_source(info.device)
    _log.info("energy source: %s", source.name if source else "none")
    cost = CostMeter(
        instance.instance_id,
        config.prices,
        clock,
        started_nanoseconds=started,
        model=model,
        interval_seconds=config.capacity_interval_seconds,
    )
    return Recorder(
        model=model,
        instance=instance,
        writer=writer,
        accounting=Accounting(cost, EnergyMeter(source, started), info.plain_step_seconds),
        metrics=Metrics(telemetry.meter),
        clock=clock,
        tenant_key=tenant_key,
        drafter_fingerprints=config.drafter_fingerprints,
        step_span_every=config.step_span_every,
        on_close=engine.dispose,
    )


def _number_format(info: ModelInfo) -> str:
    """As in "bfloat16", or "bfloat16, int8 weights": two models whose tokens may differ."""
    is_plain = info.quantization == "none"
    return info.dtype if is_plain else f"{info.dtype}, {info.quantization} weights"


def model_record(info: ModelInfo) -> ModelRecord:
    """What the ledger keeps of a loaded model; a path that is too long for its column is cut."""
    return ModelRecord(
        name=info.name[:512],
        fingerprint=info.fingerprint,
        dtype=_number_format(info),
        device=info.device,
        num_parameters=info.num_parameters,
        layout=info.layout,
        numerics=info.numerics,
        guarantee=info.guarantee,
    )
