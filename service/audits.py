"""The engine's audit findings as telemetry records them, and divergences kept on disk."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from engine.stats import ModelInfo
from telemetry.ledger.records import Verdict
from telemetry.recording import AuditFinding as RecordedFinding

if TYPE_CHECKING:  # it would load torch
    from engine.audit import AuditFinding

_log = logging.getLogger(__name__)


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


def keep(finding: "AuditFinding", info: ModelInfo, folder: Path) -> None:
    """Keep a divergence for `tandem audit replay`. A full disk costs the case and nothing else."""
    from engine.audit_case import case_of, keep_case  # it loads torch

    case = case_of(finding, info)
    if case is None:
        return
    try:
        path = keep_case(folder, case)
    except OSError:
        _log.exception("a divergence could not be kept in %s", folder)
    else:
        _log.error("kept for `tandem audit replay %s`", path)
