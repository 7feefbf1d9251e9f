"""A server: its parts, and its life from loading to the last flushed row."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from transformers import PreTrainedTokenizerBase

from engine.breaker import BreakerState
from engine.request import FinishReason
from engine.stats import ModelInfo, StepStats
from service import errors
from service.admission import Admission, AdmissionLimits
from service.audits import keep, measured, recorded
from service.calls import OpenCalls
from service.capture import PromptCapture
from service.drafter_reload import DrafterReload
from service.engine_contract import Engine
from service.engine_thread import EngineGoneError, EngineState, EngineThread
from service.experiments.heads import RegisteredHeads
from service.experiments.live import LiveExperiments, no_experiments
from service.experiments.watch import ExperimentWatch
from service.health import SERVICE_NAME, HealthMonitor
from service.interceptors import Authenticator, CallInterceptor
from service.live_requests import LiveRequests
from service.pb import generation_pb2_grpc as pb_grpc
from service.prompts import PromptEncoder
from service.servicer import GenerationServicer
from service.serving import GenerationLimits, Serving
from service.settings import ServiceSettings
from service.transport import bind, channel_options
from telemetry.recording import Recording

if TYPE_CHECKING:  # it would load torch
    from engine.audit import AuditFinding
    from engine.shadow import ShadowFinding

_log = logging.getLogger(__name__)
_MIN_RETRY_SECONDS = 1.0
_ENGINE_STOP_SECONDS = 10.0
_LAST_WRITES_SECONDS = 0.5  # for statuses that are on their way; only open Watch calls use it up


@dataclass(frozen=True, slots=True)
class Parts:
    """What a server is made of. build_engine runs in the engine's thread and may be slow;
    open_recording is called once the model is known, close_telemetry last of all. reloads are
    what SIGHUP reads again, by name: each takes over all of it or raises OSError or ValueError;
    it is given the recording once there is one. Heads and experiments are read again with them."""

    build_engine: Callable[[], Engine]
    load_tokenizer: Callable[[], PreTrainedTokenizerBase]
    open_recording: Callable[[ModelInfo], Recording]
    close_telemetry: Callable[[], None]
    authenticator: Authenticator
    reloads: Mapping[str, Callable[[Recording | None], None]] = field(default_factory=dict)
    heads: RegisteredHeads = field(default_factory=RegisteredHeads)
    experiments: LiveExperiments = field(default_factory=no_experiments)
    watch: ExperimentWatch | None = None
    capture: PromptCapture | None = None


class Server:
    """Listens while it loads, answers UNAVAILABLE until the engine is warm, then serves.

    Made on the event loop. `failed` is set when the engine has raised: nothing is served any
    more and the process should end with an error.
    """

    def __init__(self, settings: ServiceSettings, parts: Parts, model_name: str) -> None:
        self._settings = settings
        self._parts = parts
        self._model_name = model_name
        self._serving: Serving | None = None
        self._recording: Recording | None = None
        self._info: ModelInfo | None = None
        self._is_draining = False
        self.failed = asyncio.Event()
        self._open_calls = OpenCalls()
        self._live = LiveRequests(self._observe, self._cancel)
        self._engine = EngineThread(
            parts.build_engine,
            self._live.deliver,
            self._fail,
            self._record_step,
            self._record_audit,
            self._record_breaker,
            self._record_shadow,
        )
        self._drafters = DrafterReload(
            self._engine,
            parts.heads,
            parts.experiments,
            self._offer,
            settings.experiment_check_seconds,
        )
        self._health = HealthMonitor(
            self._is_healthy, interval_seconds=min(1.0, settings.stall_seconds / 4)
        )
        self._grpc = aio.server(
            interceptors=(CallInterceptor(parts.authenticator),),
            options=channel_options(settings),
        )
        self.port = 0

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def num_live_requests(self) -> int:
        return len(self._live)

    def serving(self) -> Serving:
        """Raises UNAVAILABLE while loading and after a failure."""
        if self.failed.is_set():
            raise errors.unavailable("the engine has failed", _MIN_RETRY_SECONDS)
        if self._serving is None:
            raise errors.unavailable("the model is being loaded", _MIN_RETRY_SECONDS)
        return self._serving

    def check_open(self) -> None:
        """Raises UNAVAILABLE while draining."""
        if self._is_draining:
            raise errors.unavailable("the server is shutting down", _MIN_RETRY_SECONDS)

    async def listen(self) -> None:
        """Take the port; `port` is the one in use. Raises OSError when it is taken."""
        pb_grpc.add_GenerationServiceServicer_to_server(
            GenerationServicer(self, self._settings, self._open_calls), self._grpc
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._grpc)
        if self._settings.reflection:
            reflection.enable_server_reflection(
                (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME), self._grpc
            )
        self.port = bind(self._grpc, self._settings)
        await self._health.start()
        await self._grpc.start()

    async def load(self) -> None:
        """Load and warm the engine, then serve. Raises what loading raises."""
        tokenizer = await asyncio.to_thread(self._parts.load_tokenizer)
        info = self._info = await self._engine.start()
        await self._drafters.open(info)
        info = self._info
        self._recording = self._parts.open_recording(info)
        self._serving = Serving(
            info=info,
            model_name=self._model_name,
            tokenizer=tokenizer,
            encoder=PromptEncoder(tokenizer, self._settings.max_prompt_bytes),
            engine=self._engine,
            live=self._live,
            admission=self._admission(),
            recording=self._recording,
            limits=GenerationLimits(
                max_tokens=self._settings.max_tokens,
                max_draft_tokens=self._settings.max_draft_tokens,
                max_unread_messages=self._settings.max_unread_messages,
                coalesce_tokens=self._settings.coalesce_tokens,
                coalesce_seconds=self._settings.coalesce_seconds,
                finish_when_recorded=self._settings.finish_when_recorded,
            ),
            gate=self,
            experiments=self._parts.experiments,
            capture=self._parts.capture,
        )
        if self._parts.watch is not None:
            self._parts.watch.start()
        await self._health.update()

    def _admission(self) -> Admission:
        return Admission(
            AdmissionLimits(
                num_rows=self._settings.max_num_rows,
                max_waiting_requests=self._settings.max_waiting_requests,
                max_waiting_tokens=self._settings.max_waiting_tokens,
            )
        )

    def reload(self) -> None:
        """Take over changed settings; what is wrong with one is logged and changes nothing."""
        for name, read in self._parts.reloads.items():
            try:
                read(self._recording)
            except (OSError, ValueError) as error:
                _log.error("%s not reloaded: %s", name, error)
            else:
                _log.info("%s reloaded", name)
        self._drafters.request()

    def _offer(self, info: ModelInfo) -> None:
        self._info = info
        if self._serving is not None:
            self._serving = replace(self._serving, info=info)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new requests, let live ones finish within the grace period, flush, end."""
        self._is_draining = True
        await self._health.close()
        await self._drafters.stop()
        if self._parts.watch is not None:
            await self._parts.watch.stop()
        # Said at once: a channel with a live stream takes its next requests elsewhere.
        goaway = asyncio.create_task(self._grpc.stop(grace_seconds))
        is_done = await self._open_calls.wait_for_none(grace_seconds)
        if not is_done:
            _log.warning("ending %d calls", len(self._open_calls))
        await self._grpc.stop(_LAST_WRITES_SECONDS if is_done else None)
        await goaway
        await self._wait_for_rows()
        if not await self._engine.stop(_ENGINE_STOP_SECONDS):
            _log.error("the engine did not leave its step")
        self._live.fail_all(EngineGoneError("the server has stopped"))
        if self._serving is not None:
            self._serving.encoder.close()
        if self._recording is not None:
            await asyncio.to_thread(self._recording.close)
        if self._parts.capture is not None:
            await asyncio.to_thread(self._parts.capture.close)
        await asyncio.to_thread(self._parts.close_telemetry)

    async def _wait_for_rows(self) -> None:
        """Let the engine end what its clients have left, so that it is recorded in full."""
        if self._engine.state is not EngineState.RUNNING or not self._live:
            return
        try:
            await asyncio.wait_for(self._live.wait_until_empty(), _ENGINE_STOP_SECONDS)
        except TimeoutError:
            _log.error("%d requests are still live", len(self._live))

    def _observe(self, stats: StepStats) -> None:
        if self._serving is not None:
            num_positions = sum(row.num_positions for row in stats.rows)
            self._serving.admission.observe(num_positions, stats.duration_nanoseconds / 1e9)

    def _cancel(self, request_id: str, reason: FinishReason) -> None:
        self._engine.cancel(request_id, reason)

    def _record_step(self, stats: StepStats) -> None:
        if self._recording is not None:
            self._recording.on_step(stats)

    def _record_audit(self, finding: "AuditFinding") -> None:
        if self._settings.audit_cases is not None and self._info is not None:
            keep(finding, self._info, self._settings.audit_cases.expanduser())
        if self._recording is not None:
            variant = self._parts.experiments.variant_of(finding.request_id)
            self._recording.on_audit(recorded(finding, variant))

    def _record_shadow(self, finding: "ShadowFinding") -> None:
        if self._recording is not None:
            variant = self._parts.experiments.variant_of(finding.request_id)
            self._recording.on_shadow(measured(finding, variant))

    def _record_breaker(self, state: BreakerState) -> None:
        if self._recording is not None:
            self._recording.on_breaker(str(state))

    def _fail(self, error: Exception) -> None:
        _log.critical("the engine has failed", exc_info=error)
        self.failed.set()
        self._live.fail_all(EngineGoneError("the engine has failed"))

    def _is_healthy(self) -> bool:
        return (
            self._serving is not None
            and not self._is_draining
            and self._engine.state is EngineState.RUNNING
            and self._engine.seconds_in_step() < self._settings.stall_seconds
        )
