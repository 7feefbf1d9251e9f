"""A real OTLP/gRPC receiver within the test process: what arrives is asserted as protobuf."""

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


@dataclass
class Received:
    """Everything that arrived, in order."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)  # the newest of each name
    resources: list[Any] = field(default_factory=list)


class _Traces(trace_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        for resource_spans in request.resource_spans:
            self._received.resources.append(resource_spans.resource)
            for scope in resource_spans.scope_spans:
                self._received.spans.extend(scope.spans)
        return trace_pb.ExportTraceServiceResponse()


class _Metrics(metrics_grpc.MetricsServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        for resource_metrics in request.resource_metrics:
            for scope in resource_metrics.scope_metrics:
                self._received.metrics.update({metric.name: metric for metric in scope.metrics})
        return metrics_pb.ExportMetricsServiceResponse()


@contextmanager
def otlp_receiver() -> Iterator[Received]:
    received = Received()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(_Traces(received), server)
    metrics_grpc.add_MetricsServiceServicer_to_server(_Metrics(received), server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of a span, a data point, a resource or an event as plain values."""
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in item.attributes}
