"""The engine's audit findings as telemetry records them."""

from typing import TYPE_CHECKING

from telemetry.ledger.records import Verdict
from telemetry.recording import AuditFinding as RecordedFinding

if TYPE_CHECKING:  # it would load torch
    from engine.audit import AuditFinding


def recorded(finding: "AuditFinding", variant: str = "") -> RecordedFinding:
    """The same finding, in the ledger's terms."""
    return RecordedFinding(
        request_id=finding.request_id,
        verdict=Verdict(finding.verdict.value),
        num_checked_tokens=finding.num_checked_tokens,
        num_mismatched_tokens=finding.num_mismatched_tokens,
        first_mismatch_index=finding.first_mismatch_index,
        smallest_margin=finding.smallest_margin,
        epsilon=finding.epsilon,
        audit_seconds=finding.audit_seconds,
        drafter=finding.drafter,
        variant=variant,
    )
