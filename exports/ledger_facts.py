"""What an export knows about the ledger beside its rows: how far it reads, what must add up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Watermark:
    """The last row of each append-only table that an export covers; 0 is before the first."""

    ledger_id: int = 0
    capacity_id: int = 0
    audit_id: int = 0


@dataclass(frozen=True, slots=True)
class DayTotals:
    """One UTC date of the ledger, summed by the database over its current rows."""

    num_requests: int = 0
    num_superseded: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_accepted_tokens: int = 0
    cost_nano_usd: int = 0
