"""Ledger records for tests, with every column set to something recognisable."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from telemetry.ledger.records import (
    DrafterRecord,
    LatencySummary,
    ModelRecord,
    Outcome,
    PriceRecord,
    RequestCost,
    RequestRecord,
    SamplingSummary,
    StartRecord,
    TenantRecord,
    TokenCounts,
    new_record_id,
)

STARTED_AT = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
MODEL = ModelRecord("tiny", "f1", "float32", "cpu", 1000, "ragged", "invariant", "bit_exact")
TENANT = TenantRecord("aa11", "k1")
PRICE = PriceRecord(
    book_version="t1",
    machine_type="box",
    purchase="on_demand",
    currency="USD",
    nano_usd_per_hour=3_600_000_000,
    embodied_nano_usd_per_hour=0,
    valid_from=datetime(2026, 1, 1, tzinfo=UTC),
)


def request_record(request_id: str = "r", **changes: object) -> RequestRecord:
    """A completed request; `changes` replace fields."""
    record = RequestRecord(
        record_id=new_record_id(),
        instance_id="i1",
        request_id=request_id,
        attempt=1,
        started_at=STARTED_AT,
        finished_at=STARTED_AT + timedelta(seconds=2),
        outcome=Outcome.COMPLETED,
        status_code="OK",
        latency=LatencySummary(2.0, 0.25, 0.5, 0.01, 0.02),
        counts=TokenCounts(
            num_prompt_tokens=7,
            num_output_tokens=9,
            num_verify_steps=5,
            num_draft_tokens=9,
            num_accepted_tokens=4,
        ),
        cost=RequestCost(1000, 300, 300, 300, 100, 100, 5000, None, "none"),
        sampling=SamplingSummary(0.0, 0, 1.0, "coupled", 42, "auto", 64),
        drafted_per_position=(5, 4),
        accepted_per_position=(3, 1),
        accepted_per_length=(1, 3),
        model=MODEL,
        drafter=DrafterRecord("prompt_lookup"),
        variant="a",
        tenant=TENANT,
        price=PRICE,
        labels={"team": "búsqueda"},
        trace_id="0" * 31 + "1",
        finish_reason="length",
    )
    return replace(record, **changes)  # type: ignore[arg-type]


def start_record(record: RequestRecord) -> StartRecord:
    """The start that belongs to a request."""
    return StartRecord(
        record_id=record.record_id,
        instance_id=record.instance_id,
        request_id=record.request_id,
        attempt=record.attempt,
        started_at=record.started_at,
        model=record.model,
        variant=record.variant,
        tenant=record.tenant,
        price=record.price,
        num_prompt_tokens=record.counts.num_prompt_tokens,
        labels=record.labels,
        trace_id=record.trace_id,
    )
