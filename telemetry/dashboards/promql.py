"""PromQL over the metrics of telemetry.names, as Prometheus shows their names."""

from telemetry.names import Instrument, MetricSpec

_UNIT_SUFFIXES = {
    "s": "_seconds",
    "By": "_bytes",
    "J": "_joules",
    "USD": "_USD",
    "{token}/s": "_per_second",
}


def prometheus_name(spec: MetricSpec) -> str:
    """The name without a histogram's `_bucket`, `_sum` and `_count`."""
    name = spec.name.replace(".", "_") + _UNIT_SUFFIXES.get(spec.unit, "")
    return name + "_total" if spec.instrument is Instrument.COUNTER else name


def label(attribute: str) -> str:
    """An attribute as a Prometheus label."""
    return attribute.replace(".", "_")


def rate(spec: MetricSpec, by: str | None = None, window: str = "$__rate_interval") -> str:
    """Growth per second of a counter, summed over everything but `by`."""
    grouping = f" by ({label(by)})" if by else ""
    return f"sum{grouping} (rate({prometheus_name(spec)}[{window}]))"


def quantile(share: float, spec: MetricSpec, window: str = "$__rate_interval") -> str:
    """A quantile of a histogram over all series."""
    buckets = f"sum by (le) (rate({prometheus_name(spec)}_bucket[{window}]))"
    return f"histogram_quantile({share}, {buckets})"


def ratio(above: MetricSpec, below: MetricSpec, by: str | None, window: str) -> str:
    """Growth of one counter over that of another."""
    return f"{rate(above, by, window)} / {rate(below, by, window)}"
