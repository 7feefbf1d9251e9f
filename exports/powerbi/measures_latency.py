"""Measures of latency, from additive histograms."""

from exports.powerbi.measure import (
    LATENCY,
    SECONDS,
    Measure,
)


def _percentile(metric: str, label: str, percent: int) -> Measure:
    share = percent / 100
    return Measure(
        LATENCY,
        f"{label} P{percent} (s)",
        "Latency",
        f"""VAR Buckets =
    CALCULATETABLE(
        SUMMARIZE('{LATENCY}', '{LATENCY}'[Upper Seconds], "N", SUM('{LATENCY}'[Requests Count])),
        KEEPFILTERS('{LATENCY}'[Metric] = "{metric}")
    )
VAR Wanted = {share} * SUMX(Buckets, [N])
VAR Reached =
    FILTER(
        Buckets,
        VAR Upper = '{LATENCY}'[Upper Seconds]
        RETURN SUMX(FILTER(Buckets, '{LATENCY}'[Upper Seconds] <= Upper), [N]) >= Wanted
    )
RETURN IF(Wanted > 0, MINX(Reached, '{LATENCY}'[Upper Seconds]))""",
        f"""WITH buckets AS (
    SELECT upper_seconds, sum(num_requests) AS n FROM fact_latency_histogram
    WHERE metric = '{metric}' GROUP BY upper_seconds
), running AS (
    SELECT upper_seconds, sum(n) OVER (ORDER BY upper_seconds) AS reached, sum(n) OVER () AS total
    FROM buckets
) SELECT min(upper_seconds) FROM running WHERE reached >= {share} * total""",
        SECONDS,
        f"Upper bound of the bucket that holds the {percent}th percentile; at most 7 % too high",
    )


def _mean(metric: str, label: str) -> Measure:
    only = f"""KEEPFILTERS('{LATENCY}'[Metric] = "{metric}")"""
    return Measure(
        LATENCY,
        f"{label} Mean (s)",
        "Latency",
        f"CALCULATE(DIVIDE(SUM('{LATENCY}'[Sum Microseconds]), "
        f"1000000 * SUM('{LATENCY}'[Requests Count])), {only})",
        "SELECT sum(sum_microseconds) / 1e6 / sum(num_requests) FROM fact_latency_histogram "
        f"WHERE metric = '{metric}'",
        SECONDS,
        "Mean over requests",
    )


LATENCIES = (
    *(
        _percentile(metric, label, percent)
        for metric, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "End-to-end"))
        for percent in (50, 95, 99)
    ),
    _percentile("queue", "Queue", 95),
    _mean("ttft", "TTFT"),
    _mean("tpot", "TPOT"),
    _mean("e2e", "End-to-end"),
)
