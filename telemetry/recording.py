"""What the service calls to have its work recorded: the interface and the data that crosses it.

`telemetry.recorder.Recorder` is the implementation; the service holds it as `Recording`.

    open_request = recording.begin(request, labels=..., variant=..., trace=...)
    recording.on_step(step.stats)                     # engine thread, after every step
    done = recording.on_finished(open_request, stats, status_code="OK")
    ... done.cost and done.latency go into the `finished` message ...
    await asyncio.wrap_future(done.durable)           # optional: the row is on disk

Every method is thread-safe, returns within microseconds and never raises for a failure of
telemetry: a database or a collector that is away costs no request. The exceptions are
programming errors (a request finished twice), which raise ValueError.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from engine.request import GenerationRequest
from engine.stats import RequestStats, StepStats
from telemetry.ledger.records import (
    LatencySummary,
    RequestCost,
    SamplingSummary,
    TenantRecord,
    Verdict,
)
from telemetry.prices import PriceSchedule
from telemetry.tracing import RequestTrace


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """An accepted request until it is finished. Made by `Recording.begin`."""

    record_id: str
    request_id: str
    attempt: int
    started_at: datetime
    sampling: SamplingSummary
    num_prompt_tokens: int
    variant: str
    tenant: TenantRecord | None
    labels: Mapping[str, str]
    trace: RequestTrace | None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What telemetry knows of a request at its end.

    durable completes with True once the ledger row is committed or fsynced in the local
    journal, with False if it could be written nowhere (journal full, disk gone).
    """

    cost: RequestCost
    latency: LatencySummary
    durable: "Future[bool]"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The auditor's verdict on a finished request.

    smallest_margin and epsilon are in logits; None where no token differed.
    """

    request_id: str
    verdict: Verdict
    num_checked_tokens: int
    num_mismatched_tokens: int
    first_mismatch_index: int | None
    smallest_margin: float | None
    epsilon: float | None
    audit_seconds: float
    drafter: str = ""
    variant: str = ""
    record_id: str | None = None


@dataclass(frozen=True, slots=True)
class ShadowFinding:
    """What a head would have got accepted in a finished request, and how many chosen requests
    were given up since the finding before."""

    request_id: str
    drafter: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    replay_seconds: float
    num_given_up: int = 0
    variant: str = ""


class Recording(Protocol):
    """Where the service records requests, steps and audits."""

    def begin(
        self,
        request: GenerationRequest,
        *,
        labels: Mapping[str, str],
        variant: str,
        trace: RequestTrace | None,
    ) -> OpenRequest:
        """Note that a request was accepted, before the engine gets it.

        variant "" means that no experiment runs. The tenant's name in `request` is replaced by
        its pseudonym here and goes no further.
        """
        ...

    def on_step(self, stats: StepStats) -> None:
        """Account for one engine step. Called by the engine thread alone, steps in order."""
        ...

    def on_finished(
        self, open_request: OpenRequest, stats: RequestStats, *, status_code: str
    ) -> FinishedRequest:
        """Record the end of a request, whatever its outcome; after the `on_step` of its last step.

        status_code is the name of the gRPC status that the caller gets ("OK", "CANCELLED", ...).
        Ends the spans of the trace that `begin` was given, its server span excepted.
        Raises ValueError when the request was finished before.
        """
        ...

    def on_lost(self, open_request: OpenRequest, *, status_code: str, error: str) -> None:
        """Record an accepted request for which the engine gave no RequestStats (it died)."""
        ...

    def on_refused(
        self,
        request_id: str,
        *,
        status_code: str,
        reason: str,
        error: str,
        tenant: str = "",
        labels: Mapping[str, str] | None = None,
        num_prompt_tokens: int = 0,
        trace_id: str | None = None,
    ) -> None:
        """Record a request that never reached the engine.

        reason is a short word from a fixed set (it becomes a metric's attribute), error a
        sentence without content.
        """
        ...

    def on_audit(self, finding: AuditFinding) -> None:
        """Record a verdict of the equivalence auditor."""
        ...

    def on_shadow(self, finding: ShadowFinding) -> None:
        """Record the acceptance of a head that drafted for nobody."""
        ...

    def on_breaker(self, state: str) -> None:
        """The breaker that switches speculation off after divergences is now in `state`.

        state is "closed", "open" or "half_open". Noted on the traces of all open requests.
        """
        ...

    def reprice(self, prices: PriceSchedule) -> None:
        """Let the machine's time cost what `prices` say, from now on."""
        ...

    def close(self) -> None:
        """Close the running capacity interval, write everything out, flush the exporters."""
        ...
