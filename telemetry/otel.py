"""OpenTelemetry providers: OTLP and Prometheus where configured, otherwise nothing at all.

Exporting never slows a request: spans and metrics leave from background threads, a collector
that is away costs samples only, and each failure is counted.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from opentelemetry import metrics, trace
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter, NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NoOpTracerProvider, Tracer

from telemetry import names

_SHUTDOWN_MILLISECONDS = 5_000
_EXPORTED = ("spans", "metrics")


@dataclass(frozen=True, slots=True)
class OtelConfig:
    """Where telemetry goes. The defaults send nothing anywhere.

    otlp_endpoint: `http://host:4317` or `https://...`; None switches OTLP off.
    otlp_signals: what goes there; some receivers take traces only.
    prometheus_port: the port of `/metrics`; None switches it off, 0 takes a free one.
    trace_sample_ratio: share of traces kept where the caller has not decided.
    """

    otlp_endpoint: str | None = None
    otlp_signals: tuple[Literal["traces", "metrics"], ...] = ("traces", "metrics")
    otlp_headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    prometheus_port: int | None = None
    prometheus_host: str = "127.0.0.1"
    metric_interval_seconds: float = 15.0
    trace_sample_ratio: float = 1.0
    service_name: str = "tandem"
    service_version: str = ""
    instance_id: str = ""


@dataclass(slots=True)
class Telemetry:
    """The running providers. `close` flushes what is waiting, within seconds."""

    tracer: Tracer
    meter: Meter
    prometheus_port: int | None = None
    tracer_provider: TracerProvider | None = None
    meter_provider: MeterProvider | None = None
    _closers: list[Callable[[], object]] = field(default_factory=list)
    _failures: "ExportFailures" = field(default_factory=lambda: ExportFailures())

    @property
    def is_tracing(self) -> bool:
        """Whether spans go anywhere."""
        return self.tracer_provider is not None

    def num_export_failures(self) -> dict[str, int]:
        """Batches that the collector did not take, by kind, since the start."""
        return self._failures.totals()

    def install(self) -> None:
        """Make these the process's providers, for code that asks the OpenTelemetry API.

        Once per process, by the server; OpenTelemetry ignores a second time with a warning.
        """
        if self.tracer_provider is not None:
            trace.set_tracer_provider(self.tracer_provider)
        if self.meter_provider is not None:
            metrics.set_meter_provider(self.meter_provider)

    def close(self) -> None:
        """Flush and stop. Afterwards nothing is exported any more."""
        for closer in self._closers:
            closer()
        self._closers.clear()


def start_telemetry(
    config: OtelConfig,
    *,
    span_exporter: SpanExporter | None = None,
    metric_readers: Sequence[MetricReader] = (),
) -> Telemetry:
    """Start what `config` asks for; the two other arguments add receivers within the process.

    Nothing global is set: the tracer and the meter are handed over. Raises OSError when the
    Prometheus port is taken.
    """
    failures = ExportFailures()
    closers: list[Callable[[], object]] = []
    resource = Resource.create(
        {
            "service.name": config.service_name,
            "service.version": config.service_version,
            "service.instance.id": config.instance_id,
        }
    )
    tracers = _start_tracing(config, resource, span_exporter, failures)
    if tracers is not None:
        closers.append(tracers.shutdown)
    readers = list(metric_readers)
    if config.otlp_endpoint and "metrics" in config.otlp_signals:
        readers.append(
            PeriodicExportingMetricReader(
                _CountingMetricExporter(_otlp_metrics(config), failures),
                export_interval_millis=config.metric_interval_seconds * 1000,
            )
        )
    port = None
    if config.prometheus_port is not None:
        reader, port, closer = _start_prometheus(config)
        readers.append(reader)
        closers.append(closer)
    meters = MeterProvider(readers, resource) if readers else None
    if meters is not None:
        closers.insert(0, partial(meters.shutdown, _SHUTDOWN_MILLISECONDS))
        failures.count_with(meters.get_meter(names.SCOPE))
    return Telemetry(
        tracer=(tracers or NoOpTracerProvider()).get_tracer(names.SCOPE),
        meter=(meters or NoOpMeterProvider()).get_meter(names.SCOPE),
        prometheus_port=port,
        tracer_provider=tracers,
        meter_provider=meters,
        _closers=closers,
        _failures=failures,
    )


class ExportFailures:
    """Counts batches that could not be exported."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, int] = {}
        self._add: Callable[[int, dict[str, str]], None] | None = None

    def count_with(self, meter: Meter) -> None:
        """Show the counts as a metric from now on."""
        spec = names.EXPORT_FAILURES
        self._add = meter.create_counter(spec.name, spec.unit, spec.description).add
        for kind in _EXPORTED:  # a counter that begins with its first failure shows no increase
            self._add(0, {names.ATTR_KIND: kind})

    def note(self, kind: str) -> None:
        with self._lock:
            self._totals[kind] = self._totals.get(kind, 0) + 1
        if self._add is not None:
            self._add(1, {names.ATTR_KIND: kind})

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)


class _CountingSpanExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, failures: ExportFailures) -> None:
        self._inner = inner
        self._failures = failures

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._failures.note("spans")
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _CountingMetricExporter(MetricExporter):
    def __init__(self, inner: MetricExporter, failures: ExportFailures) -> None:
        super().__init__()
        self._inner = inner
        self._failures = failures

    def export(
        self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object
    ) -> MetricExportResult:
        result = self._inner.export(metrics_data, timeout_millis, **kwargs)
        if result is not MetricExportResult.SUCCESS:
            self._failures.note("metrics")
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: object) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)


def _start_tracing(
    config: OtelConfig, resource: Resource, extra: SpanExporter | None, failures: ExportFailures
) -> TracerProvider | None:
    exporters = [extra] if extra is not None else []
    if config.otlp_endpoint and "traces" in config.otlp_signals:
        exporters.append(_CountingSpanExporter(_otlp_spans(config), failures))
    if not exporters:
        return None
    sampler = ParentBased(TraceIdRatioBased(config.trace_sample_ratio))
    provider = TracerProvider(sampler=sampler, resource=resource)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
    return provider


def _otlp_spans(config: OtelConfig) -> SpanExporter:
    return OTLPSpanExporter(
        endpoint=config.otlp_endpoint,
        insecure=_is_insecure(config),
        headers=config.otlp_headers or None,
        timeout=5,
    )


def _otlp_metrics(config: OtelConfig) -> MetricExporter:
    return OTLPMetricExporter(
        endpoint=config.otlp_endpoint,
        insecure=_is_insecure(config),
        headers=config.otlp_headers or None,
        timeout=5,
    )


def _is_insecure(config: OtelConfig) -> bool:
    return not str(config.otlp_endpoint).startswith("https://")


def _start_prometheus(config: OtelConfig) -> tuple[MetricReader, int, Callable[[], object]]:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry)
    server, _thread = start_http_server(
        config.prometheus_port or 0, config.prometheus_host, registry=registry
    )

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return reader, server.server_port, stop
