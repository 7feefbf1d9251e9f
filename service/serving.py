"""What every call works with: the parts of a loaded server, and who calls."""

from dataclasses import dataclass, replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from engine.request import SpeculationMode, SpeculationParams
from engine.stats import ModelInfo
from service import errors
from service.admission import Admission, TenantQuota
from service.capture import PromptCapture
from service.engine_thread import EngineThread
from service.experiments.live import LiveExperiments
from service.live_requests import LiveRequests
from service.prompts import PromptEncoder
from telemetry.recording import Recording
from telemetry.tracing import CallSpan


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and until when the answer is wanted. deadline_at is a monotonic instant."""

    tenant: str
    quota: TenantQuota
    deadline_at: float
    call: CallSpan
    may_be_captured: bool = True


@dataclass(frozen=True, slots=True)
class GenerationLimits:
    max_tokens: int
    max_draft_tokens: int
    max_unread_messages: int
    coalesce_tokens: int = 0  # 0: as they come
    coalesce_seconds: float = 0.0
    finish_when_recorded: bool = False


class Gate(Protocol):
    """Raises the ServiceError for a request that comes while none is taken."""

    def check_open(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Serving:
    """What every call needs, for the life of a server."""

    info: ModelInfo
    model_name: str
    tokenizer: PreTrainedTokenizerBase
    encoder: PromptEncoder
    engine: EngineThread
    live: LiveRequests
    admission: Admission
    recording: Recording
    limits: GenerationLimits
    gate: Gate
    experiments: LiveExperiments
    capture: PromptCapture | None = None

    def check_model(self, model: str) -> None:
        """Raises NOT_FOUND for a model other than the loaded one; "" is the loaded one."""
        if model and model != self.model_name:
            raise errors.model_not_found(model, self.model_name)

    def speculation_in_force(self, wanted: SpeculationParams) -> SpeculationParams:
        """`wanted` with the server's choice where it leaves one. Heads of the registry draft only
        for who names them; nobody drafts where speculation is off."""
        if wanted.mode is SpeculationMode.OFF:
            return replace(wanted, max_draft_tokens=0, drafter=None, drafters=())
        most = wanted.max_draft_tokens
        if most is None:
            most = self.limits.max_draft_tokens
        names = wanted.named_drafters
        if names is None:
            names = tuple(n for n in self.info.drafters if not n.startswith("head:"))
        return replace(wanted, max_draft_tokens=most, drafter=None, drafters=names)
