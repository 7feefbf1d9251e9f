"""An experiment's requests and audits from the ledger, a part at a time, in their order.

All servers of one ledger read the same rows and so come to the same decision, and a restart
begins where the evidence stands, not with a new allowance of false alarms.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from service.experiments.specification import Experiment
from service.experiments.tally import Observation, Tally
from telemetry.ledger import models
from telemetry.ledger.records import Outcome, Verdict

_PAGE_ROWS = 5_000
LAG = timedelta(seconds=5)  # PostgreSQL numbers rows before their transactions commit
_FAILURES = (Outcome.FAILED.value, Outcome.ORPHANED.value)


@dataclass(slots=True)
class Watermarks:
    """What was read last."""

    request: int | None = None
    audit: int = 0


class LedgerReader:
    """Feeds a tally with what the ledger has got since the last time."""

    def __init__(self, engine: Engine, tally: Tally) -> None:
        self._engine = engine
        self._tally = tally
        self._read = Watermarks()

    def advance(self, now: datetime) -> int:
        """The number of new requests. Raises SQLAlchemyError."""
        count = 0
        with Session(self._engine) as session:
            for observation in self._requests(session, now):
                self._tally.add(observation)
                count += 1
            for variant in self._divergences(session, now):
                self._tally.add_divergence(variant)
        return count

    def next_at(self, after: datetime) -> datetime | None:
        """The first instant at which `advance` would see rows that were too new for it at
        `after`; None where there are none yet. Raises SQLAlchemyError."""
        with Session(self._engine) as session:
            found = [
                session.scalar(select(func.min(column)).where(column > after - LAG))
                for column in (models.Request.recorded_at, models.AuditResult.recorded_at)
            ]
        known = [at for at in found if at is not None]
        return min(known) + LAG if known else None

    def _requests(self, session: Session, now: datetime) -> Iterator[Observation]:
        experiment, request = self._tally.experiment, models.Request
        names = [variant.name for variant in experiment.variants]
        if self._read.request is None:
            # By its index: the years before the experiment are not gone through.
            first = session.scalar(
                select(func.min(request.ledger_id)).where(
                    request.recorded_at >= experiment.started_at
                )
            )
            if first is None:
                return
            self._read.request = first - 1
        while True:
            rows = session.execute(
                select(
                    request.ledger_id,
                    models.Variant.name,
                    models.Tenant.pseudonym,
                    request.request_id,
                    request.started_at,
                    request.outcome,
                    request.num_accepted_tokens,
                    request.num_plain_steps,
                    request.num_verify_steps,
                    request.tpot_seconds,
                )
                .join(models.Variant, models.Variant.variant_key == request.variant_key)
                .outerjoin(models.Tenant, models.Tenant.tenant_key == request.tenant_key)
                .where(
                    request.ledger_id > self._read.request,
                    request.recorded_at <= now - LAG,
                    request.started_at >= experiment.started_at,
                    request.revision == 0,
                    models.Variant.name.in_(names),
                )
                .order_by(request.ledger_id)
                .limit(_PAGE_ROWS)
            ).all()
            for row in rows:
                self._read.request = row.ledger_id
                if "#" not in row.request_id:  # further completions of a request are no new draw
                    yield _observation(row, experiment)
            if len(rows) < _PAGE_ROWS:
                return

    def _divergences(self, session: Session, now: datetime) -> list[str]:
        audit = models.AuditResult
        rows = session.execute(
            select(audit.audit_id, models.Variant.name, audit.verdict)
            .join(models.Variant, models.Variant.variant_key == audit.variant_key)
            .where(
                audit.audit_id > self._read.audit,
                audit.recorded_at <= now - LAG,
                audit.audited_at >= self._tally.experiment.started_at,
            )
            .order_by(audit.audit_id)
        ).all()
        if rows:
            self._read.audit = rows[-1][0]
        return [name for _, name, verdict in rows if verdict == Verdict.DIVERGENCE.value]


def _observation(row: object, experiment: Experiment) -> Observation:
    values = row._mapping  # type: ignore[attr-defined] # a row of SQLAlchemy
    num_steps = values["num_plain_steps"] + values["num_verify_steps"]
    tenant = values["pseudonym"]
    return Observation(
        variant=values["name"],
        unit=tenant if experiment.unit == "tenant" and tenant else values["request_id"],
        at=values["started_at"].timestamp(),
        is_failed=values["outcome"] in _FAILURES,
        accepted_per_step=values["num_accepted_tokens"] / num_steps if num_steps else None,
        seconds_per_token=values["tpot_seconds"],
    )
