"""From the table of names to OpenTelemetry's instruments."""

from typing import Any

from opentelemetry.metrics import Meter

from telemetry.names import Instrument, MetricSpec


def create_instrument(meter: Meter, spec: MetricSpec) -> Any:
    """The instrument that `spec` describes."""
    match spec.instrument:
        case Instrument.COUNTER:
            return meter.create_counter(spec.name, spec.unit, spec.description)
        case Instrument.GAUGE:
            return meter.create_gauge(spec.name, spec.unit, spec.description)
        case Instrument.HISTOGRAM:
            return meter.create_histogram(
                spec.name,
                spec.unit,
                spec.description,
                explicit_bucket_boundaries_advisory=spec.buckets,
            )
