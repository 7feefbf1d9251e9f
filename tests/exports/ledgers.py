"""Small ledgers with known content, written straight into the ledger's tables."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event, insert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session

from telemetry.ledger.models import (
    AuditResult,
    CapacityInterval,
    Drafter,
    Model,
    Price,
    Request,
    RequestAcceptance,
    Tenant,
    Variant,
)
from telemetry.ledger.session import migrate, open_ledger

NOON = datetime(2026, 3, 28, 12, 30, tzinfo=UTC)
SEEN = datetime(2026, 1, 1, tzinfo=UTC)


def new_ledger(folder: Path) -> str:
    """URL of an empty SQLite ledger."""
    url = f"sqlite:///{folder / 'ledger.db'}"
    migrate(url)
    return url


@dataclass
class LedgerFill:
    """Adds rows to a ledger; keys count up as the database would."""

    url: str
    num_requests: int = 0
    num_intervals: int = 0
    num_audits: int = 0
    added: list[dict[str, Any]] = field(default_factory=list)

    def dimensions(self) -> None:
        with self._session() as session:
            session.add_all(
                [
                    Model(
                        model_key=key,
                        name=f"model-{key}",
                        fingerprint=f"f{key}",
                        dtype="float32",
                        device="cpu",
                        num_parameters=135_000_000,
                        layout="ragged",
                        numerics="invariant",
                        guarantee="bit_exact",
                        first_seen_at=SEEN,
                    )
                    for key in (1, 2)
                ]
            )
            session.add(
                Drafter(drafter_key=1, name="prompt_lookup", fingerprint="", first_seen_at=SEEN)
            )
            session.add(Variant(variant_key=1, name="default", first_seen_at=SEEN))
            session.add(Variant(variant_key=2, name="candidate", first_seen_at=SEEN))
            session.add(Tenant(tenant_key=1, pseudonym="t-1", key_id="k1", first_seen_at=SEEN))
            session.add(
                Price(
                    price_key=1,
                    book_version="2026-01",
                    machine_type="cpu-2",
                    purchase="on_demand",
                    currency="USD",
                    nano_usd_per_hour=100_000_000,
                    embodied_nano_usd_per_hour=0,
                    valid_from=SEEN,
                    valid_to=None,
                )
            )
            session.commit()

    def request(
        self,
        finished_at: datetime = NOON,
        *,
        recorded_at: datetime | None = None,
        drafted: Sequence[int] = (),
        accepted: Sequence[int] = (),
        of_length: Sequence[int | None] | None = None,
        **values: Any,
    ) -> int:
        """Append a request row; returns its ledger_id. Without of_length it is an old one."""
        self.num_requests += 1
        nothing = [None] * len(drafted)
        ledger_id: int = values.pop("ledger_id", self.num_requests)
        row = {
            **request_row(ledger_id, finished_at),
            "recorded_at": recorded_at or finished_at,
            "num_verify_steps": drafted[0] if drafted else 0,
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
            "drafter_key": 1 if drafted else None,
            **values,
        }
        with self._session() as session:
            session.execute(insert(Request), [row])
            if drafted:
                session.execute(
                    insert(RequestAcceptance),
                    [
                        {
                            "request_ledger_id": ledger_id,
                            "position": position,
                            "finished_on": finished_at.date(),
                            "num_drafted": num_drafted,
                            "num_accepted": num_accepted,
                            "num_accepted_of_length": num_accepted_of_length,
                        }
                        for position, (num_drafted, num_accepted, num_accepted_of_length) in (
                            enumerate(zip(drafted, accepted, of_length or nothing, strict=True))
                        )
                    ],
                )
            session.commit()
        self.added.append(row)
        return ledger_id

    def interval(self, started_at: datetime, **values: Any) -> None:
        self.num_intervals += 1
        row = {
            "instance_id": "i-1",
            "interval_index": self.num_intervals,
            "recorded_at": started_at + timedelta(seconds=10),
            "started_at": started_at,
            "finished_at": started_at + timedelta(seconds=10),
            "model_key": 1,
            "price_key": 1,
            "wall_nanoseconds": 10_000_000_000,
            "busy_nanoseconds": 4_000_000_000,
            "idle_nanoseconds": 6_000_000_000,
            "lost_nanoseconds": 0,
            "num_steps": 100,
            "num_prefill_positions": 50,
            "num_decode_positions": 100,
            "num_draft_positions": 300,
            "num_emitted_tokens": 250,
            "max_num_running": 3,
            "max_num_waiting": 1,
            "cost_busy_nano_usd": 111_111,
            "cost_idle_nano_usd": 166_667,
            "cost_lost_nano_usd": 0,
            "energy_source": "none",
        } | values
        self._insert(CapacityInterval, row)

    def audit(self, audited_at: datetime, verdict: str = "exact", **values: Any) -> None:
        self.num_audits += 1
        row = {
            "audit_uid": f"a{self.num_audits}",
            "request_id": f"r{self.num_audits}",
            "instance_id": "i-1",
            "recorded_at": audited_at,
            "audited_at": audited_at,
            "model_key": 1,
            "drafter_key": 1,
            "variant_key": 1,
            "verdict": verdict,
            "guarantee": "bit_exact",
            "num_checked_tokens": 40,
            "num_mismatched_tokens": 0 if verdict == "exact" else 1,
            "audit_seconds": 0.1,
        } | values
        self._insert(AuditResult, row)

    def _insert(self, table: Any, row: dict[str, Any]) -> None:
        with self._session() as session:
            session.execute(insert(table), [row])
            session.commit()

    @contextmanager
    def _session(self) -> Iterator[Session]:
        # Closed after each use: some tests fork, and no connection to SQLite survives that.
        try:
            with Session(self._engine) as session:
                yield session
        finally:
            self._engine.dispose()

    @cached_property
    def _engine(self) -> Engine:
        engine = open_ledger(self.url)
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _without_fsync)
        return engine


def _without_fsync(connection: DBAPIConnection, _: object) -> None:
    # These ledgers need not outlive a power failure.
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.close()


def request_row(ledger_id: int, finished_at: datetime) -> dict[str, Any]:
    """A completed request of 20 output tokens; overwrite what a test is about."""
    return {
        "ledger_id": ledger_id,
        "record_id": f"{ledger_id:032}",
        "request_id": f"request-{ledger_id}",
        "attempt": 1,
        "revision": 0,
        "supersedes_ledger_id": None,
        "instance_id": "i-1",
        "recorded_at": finished_at,
        "started_at": finished_at - timedelta(seconds=2),
        "finished_at": finished_at,
        "finished_on": finished_at.date(),
        "model_key": 1,
        "drafter_key": None,
        "variant_key": 1,
        "tenant_key": 1,
        "price_key": 1,
        "labels": {},
        "trace_id": None,
        "outcome": "completed",
        "finish_reason": "length",
        "status_code": "OK",
        "error": None,
        "guarantee": "bit_exact",
        "temperature": 0.0,
        "acceptance_rule": "coupled",
        "speculation_mode": "auto",
        "queue_seconds": 0.01,
        "ttft_seconds": 0.2,
        "tpot_seconds": 0.09,
        "e2e_seconds": 2.0,
        "mean_step_latency_seconds": 0.1,
        "num_prompt_tokens": 30,
        "num_cached_prompt_tokens": 0,
        "num_recomputed_tokens": 0,
        "num_output_tokens": 20,
        "num_prefill_positions": 30,
        "num_steps": 20,
        "num_plain_steps": 20,
        "num_verify_steps": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_emitted_accepted_tokens": 0,
        "num_cut_tokens": 0,
        "num_drafter_positions": 0,
        "num_preemptions": 0,
        "cost_nano_usd": 1_000 + ledger_id,
        "cost_prefill_nano_usd": 500,
        "cost_decode_nano_usd": 500 + ledger_id,
        "cost_draft_nano_usd": 0,
        "cost_rejected_nano_usd": 0,
        "cost_drafter_nano_usd": 0,
        "busy_nanoseconds": 1_000_000,
        "estimated_cost_without_speculation_nano_usd": None,
        "allocation_method": "step-positions-v1",
        "energy_microjoules": None,
        "energy_source": "none",
    }
