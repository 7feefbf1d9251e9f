"""What the engine found in idle time as telemetry records it, and divergences kept on disk."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from engine.stats import ModelInfo
from telemetry.ledger.records import Verdict
from telemetry.recording import AuditFinding as RecordedFinding
from telemetry.recording import ShadowFinding as RecordedShadow

if TYPE_CHECKING:  # it would load torch
    from engine.audit import AuditFinding
    from engine.shadow import ShadowFinding

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


def measured(finding: "ShadowFinding", variant: str = "") -> RecordedShadow:
    """The same measurement of a head, in the ledger's terms."""
    return RecordedShadow(
        request_id=finding.request_id,
        drafter=finding.drafter,
        num_rounds=finding.num_rounds,
        num_draft_tokens=finding.num_draft_tokens,
        num_accepted_tokens=finding.num_accepted_tokens,
        replay_seconds=finding.replay_seconds,
        num_given_up=finding.num_given_up,
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
