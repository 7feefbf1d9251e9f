"""Who calls: what the interceptor finds out about a call and the servicer reads."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from service.admission import UNLIMITED, TenantQuota
from telemetry.tracing import CallSpan


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. models: names it may use; empty allows all. may_be_captured: its
    prompts may be kept where the server keeps any."""

    tenant: str
    quota: TenantQuota = UNLIMITED
    models: frozenset[str] = field(default_factory=frozenset)
    may_be_captured: bool = True


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Set by the interceptor for the task that runs the handler."""

    principal: Principal
    span: CallSpan


class OpenCalls:
    """Counts calls whose answer is not complete; used on the event loop."""

    def __init__(self) -> None:
        self._num_open = 0
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return self._num_open

    @contextmanager
    def one(self) -> Iterator[None]:
        self._num_open += 1
        self._none.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._none.set()

    async def wait_for_none(self, timeout_seconds: float) -> bool:
        """False when some are still open after so long."""
        if self._num_open == 0:
            return True
        try:
            await asyncio.wait_for(self._none.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True


current_call: ContextVar[CallInfo] = ContextVar("current_call")


class CallTraceFilter(logging.Filter):
    """Gives what is logged while a call is handled the id of the call's trace."""

    def filter(self, record: logging.LogRecord) -> bool:
        call = current_call.get(None)
        if call is not None and not hasattr(record, "trace_id"):
            record.trace_id = call.span.trace_id
        return True
