"""A recorder over a real SQLite ledger and receivers within the process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.request import GenerationRequest, SamplingParams
from engine.stats import ModelInfo, RequestStats
from telemetry.assembly import RecorderConfig, open_recorder
from telemetry.ledger import models
from telemetry.ledger.session import open_ledger
from telemetry.otel import OtelConfig, Telemetry, start_telemetry
from telemetry.prices import fixed_price
from telemetry.recorder import Recorder
from telemetry.recording import FinishedRequest, OpenRequest
from telemetry.tracing import RequestTrace
from tests.telemetry.step_stats import request_stats, row, step

MODEL_INFO = ModelInfo(
    name="tiny",
    fingerprint="f1",
    dtype="float32",
    device="cpu",
    num_parameters=1000,
    vocab_size=64,
    max_model_tokens=128,
    numerics="invariant",
    guarantee="bit_exact",
    layout="ragged",
    drafters=("prompt_lookup",),
    eos_token_ids=(0,),
)


@dataclass
class Rig:
    """What a test needs to drive a recorder and to look at what came out."""

    recorder: Recorder
    telemetry: Telemetry
    url: str
    spans: InMemorySpanExporter
    reader: InMemoryMetricReader

    def begin(
        self,
        request_id: str = "r",
        trace: RequestTrace | None = None,
        tenant: str = "acme",
        variant: str = "a",
    ) -> OpenRequest:
        request = GenerationRequest(
            request_id,
            (1, 2, 3),
            sampling=SamplingParams(temperature=0.5, seed=9),
            tenant=tenant,
            arrived_at=time.monotonic(),
        )
        return self.recorder.begin(request, labels={"team": "x"}, variant=variant, trace=trace)

    def run_step(self, *request_ids: str, index: int = 0) -> None:
        started = time.monotonic_ns()
        time.sleep(0.002)
        rows = [row(name, draft=3, accepted=2) for name in request_ids]
        self.recorder.on_step(step(started, time.monotonic_ns() - started, *rows, index=index))

    def finish(
        self, open_request: OpenRequest, status_code: str = "OK", **changes: object
    ) -> FinishedRequest:
        stats: RequestStats = request_stats(
            open_request.request_id, at=time.monotonic() - 1.0, **changes
        )
        return self.recorder.on_finished(open_request, stats, status_code=status_code)

    def rows(self, entity: type[Any]) -> list[Any]:
        engine = open_ledger(self.url, read_only=True)
        with Session(engine) as session:
            found = list(session.scalars(select(entity)))
            session.expunge_all()
        engine.dispose()
        return found

    def requests(self) -> list[models.Request]:
        return self.rows(models.Request)

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        if data is None:
            return {}
        return {
            metric.name: metric
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextmanager
def recording_rig(folder: Path, url: str | None = None, **options: Any) -> Iterator[Rig]:
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    telemetry = start_telemetry(OtelConfig(), span_exporter=spans, metric_readers=[reader])
    ledger_url = url or f"sqlite:///{folder}/ledger.db"
    config = RecorderConfig(
        ledger_url, folder / "journal", fixed_price("3.60"), version="1", **options
    )
    recorder = open_recorder(config, MODEL_INFO, telemetry)
    try:
        yield Rig(recorder, telemetry, ledger_url, spans, reader)
    finally:
        recorder.close()
        telemetry.close()
