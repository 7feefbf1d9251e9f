"""A divergence on disk: what it takes to decode a request again, in a file that only its owner
reads. It holds the prompt and the output, so it is written only where somebody asked for it."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from engine.audit import AuditFinding, AuditJob
from engine.stats import ModelInfo

_MAX_CASES = 100


class AuditCaseError(ValueError):
    """A case that cannot be found or read; the message names it."""


@dataclass(frozen=True, slots=True)
class AuditCase:
    """A request as it was served, by what, and where it first differed (counted in the output)."""

    fingerprint: str
    dtype: str
    layout: str
    guarantee: str
    job: AuditJob
    first_mismatch_index: int
    expected_token_id: int | None  # None where only the ending is wrong
    first_margin: float | None  # None: infinite
    epsilon: float
    quantization: str = "none"
    wrong_ending: str = ""


_adapter = TypeAdapter(AuditCase)


def case_of(finding: AuditFinding, info: ModelInfo) -> AuditCase | None:
    """None for a finding that is no divergence."""
    if finding.job is None or finding.first_mismatch_index is None:
        return None
    margin = finding.first_margin
    return AuditCase(
        fingerprint=info.fingerprint,
        dtype=info.dtype,
        layout=info.layout,
        guarantee=info.guarantee,
        job=finding.job,
        first_mismatch_index=finding.first_mismatch_index,
        expected_token_id=finding.expected_token_id,
        first_margin=None if margin is None or margin == float("inf") else margin,
        epsilon=finding.epsilon,
        quantization=info.quantization,
        wrong_ending=finding.wrong_ending,
    )


def keep_case(folder: Path, case: AuditCase) -> Path:
    """Write a case for its owner alone; the oldest beyond a hundred go. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = case_path(folder, case.job.request.request_id)
    part = path.with_suffix(f".{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as handle:
        handle.write(_adapter.dump_json(case, indent=1))
    part.replace(path)
    kept = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
    for old in kept[:-_MAX_CASES]:
        old.unlink(missing_ok=True)
    return path


def read_case(path: Path) -> AuditCase:
    """Raises AuditCaseError."""
    try:
        return _adapter.validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise AuditCaseError(f"{path}: there is no such case") from error
    except (OSError, ValidationError) as error:
        raise AuditCaseError(f"{path}: {error}") from error


def case_path(folder: Path, request_id: str) -> Path:
    """Request ids are the clients' and may hold anything, so files are named by their hash."""
    return folder / f"{hashlib.sha256(request_id.encode()).hexdigest()[:24]}.json"
