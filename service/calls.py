"""Who calls: what the interceptor finds out about a call and the servicer reads."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from service.admission import UNLIMITED, TenantQuota
from telemetry.tracing import CallSpan


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. models: names it may use; empty allows all."""

    tenant: str
    quota: TenantQuota = UNLIMITED
    models: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Set by the interceptor for the task that runs the handler."""

    principal: Principal
    span: CallSpan


current_call: ContextVar[CallInfo] = ContextVar("current_call")
