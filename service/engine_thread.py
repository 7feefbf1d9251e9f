"""The bridge between the event loop and the engine, which runs in one thread of its own.

Commands go in through an inbox that is read between steps; each step's output comes back with
one wake-up of the loop. The engine never waits for the loop, and the loop never for the engine.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING

from engine.breaker import BreakerState
from engine.config import HeadSource, ShadowPlan
from engine.request import FinishReason, GenerationRequest, StructuredOutput
from engine.stats import EngineLoad, ModelInfo, StepStats
from engine.step import StepOutput
from service.engine_commands import Cancel, Change, Command, Submit, answer, fail, settle
from service.engine_contract import Engine

if TYPE_CHECKING:  # it would load torch
    from engine.audit import AuditFinding
    from engine.shadow import ShadowFinding


class EngineState(StrEnum):
    LOADING = "loading"
    RUNNING = "running"
    STOPPED = "stopped"
    FAILED = "failed"


class EngineGoneError(RuntimeError):
    """The engine has stopped or failed, so a request cannot be handed to it."""


class EngineThread:
    """Builds an engine in a thread and runs it there until stopped.

    on_output is called on the event loop, once per step that produced something. on_failure is
    called there when the engine raises; no output follows. on_step is called in the engine's
    thread before the output of the same step is on its way, on_audit and on_shadow there in idle
    time and on_breaker when the breaker of speculation changes. Made on the event loop, to which
    all methods belong.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        on_output: Callable[[StepOutput], None],
        on_failure: Callable[[Exception], None],
        on_step: Callable[[StepStats], None],
        on_audit: Callable[["AuditFinding"], None],
        on_breaker: Callable[[BreakerState], None],
        on_shadow: Callable[["ShadowFinding"], None],
    ) -> None:
        self._on_shadow = on_shadow
        self._on_audit = on_audit
        self._on_breaker = on_breaker
        self._breaker_state = BreakerState.CLOSED
        self._build = build
        self._on_step = on_step
        self._on_output = on_output
        self._on_failure = on_failure
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._step_started_at: float | None = None
        self._load: EngineLoad | None = None
        self._state = EngineState.LOADING
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._engine: Engine | None = None
        self._grammars = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def load(self) -> EngineLoad | None:
        """As of the last step; None while loading."""
        return self._load

    def seconds_in_step(self) -> float:
        """How long the current step has been running; 0 between steps."""
        started_at = self._step_started_at
        return 0.0 if started_at is None else time.monotonic() - started_at

    async def start(self) -> ModelInfo:
        """Load the engine. Raises what its construction raises."""
        self._thread.start()
        return await asyncio.shield(self._loaded)

    def submit(self, request: GenerationRequest) -> "asyncio.Future[None]":
        """Hand over a request; the future is done when the engine has taken it.

        The future fails with RequestError when the engine refuses it, with EngineGoneError when
        the engine ends before. Raises EngineGoneError when it has ended already.
        """
        if self._state is not EngineState.RUNNING or self._stopping:
            raise EngineGoneError("the engine is not running")
        accepted: asyncio.Future[None] = self._loop.create_future()
        self._post(Submit(request, accepted))
        return accepted

    async def prepare(self, wanted: StructuredOutput) -> None:
        """Compile a grammar in a thread apart, so that no step waits for it.

        Raises RequestError when it cannot be used, EngineGoneError without an engine.
        """
        if self._engine is None:
            raise EngineGoneError("the engine is not running")
        await self._loop.run_in_executor(self._grammars, self._engine.prepare, wanted)

    async def add_head(self, source: HeadSource) -> ModelInfo:
        """Load a head in a thread apart and let it listen between two steps.

        Raises HeadFormatError naming the head and the field, EngineGoneError without an engine.
        """
        engine = self._engine
        if engine is None:
            raise EngineGoneError("the engine is not running")
        ready = await asyncio.to_thread(engine.load_head, source)
        return await self._change(lambda engine: engine.add_drafter(ready))

    async def remove_drafter(self, name: str) -> ModelInfo:
        """Offer a head no more. Raises ValueError for what cannot be taken out, EngineGoneError."""
        return await self._change(lambda engine: engine.remove_drafter(name))

    async def shadow(self, plans: Sequence[ShadowPlan]) -> ModelInfo:
        """Measure heads, in idle time, on a share of what finishes."""
        return await self._change(lambda engine: engine.shadow(plans))

    async def _change(self, apply: Callable[[Engine], ModelInfo]) -> ModelInfo:
        if self._state is not EngineState.RUNNING or self._stopping:
            raise EngineGoneError("the engine is not running")
        done: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._post(Change(apply, done))
        return await done

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Takes effect before the next step; unknown ids are ignored."""
        self._post(Cancel(request_id, reason))

    async def stop(self, timeout_seconds: float) -> bool:
        """Leave after the current step; False when it did not end in time."""
        self._grammars.shutdown(wait=False, cancel_futures=True)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_seconds)
        return not self._thread.is_alive()

    def _post(self, command: Command) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    # From here on: the engine's thread.

    def _run(self) -> None:
        try:
            self._engine = engine = self._build()
            self._load = engine.load()
        except Exception as error:
            self._state = EngineState.FAILED
            self._call(self._report_load_failure, error)
            return
        self._state = EngineState.RUNNING
        self._call(self._report_loaded, engine.info)
        try:
            while self._wait_for_work(engine):
                self._turn(engine)
        except Exception as error:
            self._state = EngineState.FAILED
            self._call(self._report_failure, error)
        else:
            self._state = EngineState.STOPPED
            self._call(self._refuse_inbox, EngineGoneError("the engine has stopped"))

    def _wait_for_work(self, engine: Engine) -> bool:
        while not (self._stopping or self._inbox or engine.has_work()):
            findings = engine.audit_slice()
            if findings is not None:
                for finding in findings:
                    self._on_audit(finding)
                    self._load = engine.load()
                self._watch_breaker(engine)
                continue
            measured = engine.shadow_next()
            if measured is not None:
                for each in measured:
                    self._on_shadow(each)
                continue
            with self._wake:
                if not (self._stopping or self._inbox):
                    self._wake.wait()
        return not self._stopping

    def _turn(self, engine: Engine) -> None:
        self._step_started_at = time.monotonic()
        try:
            self._read_inbox(engine)
            if not engine.has_work():
                return
            output = engine.step()
            if output.stats is not None:
                self._on_step(output.stats)
            self._load = engine.load()
            self._watch_breaker(engine)
        finally:
            self._step_started_at = None
        if output.deltas or output.finished or output.stats is not None:
            self._call(self._on_output, output)

    def _watch_breaker(self, engine: Engine) -> None:
        state = engine.breaker.state(time.monotonic())
        if state is not self._breaker_state:
            self._breaker_state = state
            self._on_breaker(state)

    def _read_inbox(self, engine: Engine) -> None:
        answers: list[tuple[asyncio.Future[None], Exception | None]] = []
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Cancel):
                engine.cancel(command.request_id, command.reason)
                continue
            if isinstance(command, Change):
                self._apply(engine, command)
                continue
            try:
                engine.submit(command.request)
            except ValueError as error:  # RequestError: this request alone is at fault
                answers.append((command.accepted, error))
            else:
                answers.append((command.accepted, None))
        if answers:
            self._call(answer, answers)

    def _apply(self, engine: Engine, command: Change) -> None:
        try:
            info = command.apply(engine)
        except Exception as error:  # whoever asked for it is told, and the engine goes on
            self._call(fail, command.done, error)
        else:
            self._call(settle, command.done, info)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The loop is gone, and whoever listened with it.

    # Called on the loop by the thread.

    def _report_loaded(self, info: ModelInfo) -> None:
        self._loaded.set_result(info)

    def _report_load_failure(self, error: Exception) -> None:
        self._loaded.set_exception(error)

    def _report_failure(self, error: Exception) -> None:
        self._refuse_inbox(EngineGoneError("the engine has failed"))
        self._on_failure(error)

    def _refuse_inbox(self, error: Exception) -> None:
        while self._inbox:
            command = self._inbox.popleft()
            if isinstance(command, Submit):
                fail(command.accepted, error)
            elif isinstance(command, Change):
                fail(command.done, error)
