"""The Grafana dashboard: latency tails, speculation, load, cost, energy, ledger."""

import json
from dataclasses import dataclass
from typing import Any

from telemetry import names
from telemetry.dashboards.promql import label, prometheus_name, quantile, rate, ratio

_SCHEMA_VERSION = 39
_COLUMNS, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 8, 8
_WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `queries` are (PromQL, legend)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    description: str = ""


def _tails(title: str, spec: names.MetricSpec) -> Panel:
    queries = tuple((quantile(share, spec), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
    return Panel(title, "s", queries, spec.description)


def _by(spec: names.MetricSpec, attribute: str, title: str, unit: str) -> Panel:
    return Panel(
        title, unit, ((rate(spec, attribute), f"{{{{{label(attribute)}}}}}"),), spec.description
    )


_MEAN_TOKENS = (
    f"sum (rate({prometheus_name(names.TOKENS_PER_STEP)}_sum[{_WINDOW}])) / "
    f"sum (rate({prometheus_name(names.TOKENS_PER_STEP)}_count[{_WINDOW}]))"
)
_LENGTH = f"1 + {ratio(names.ACCEPTED, names.DRAFTS, names.ATTR_DRAFTER, _WINDOW)}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Latency",
        (
            _tails("Time to first token", names.TTFT),
            _tails("Time per output token", names.TPOT),
            _tails("Step latency (between messages)", names.STEP_LATENCY),
            _tails("Queue time", names.QUEUE_TIME),
            _tails("End to end", names.REQUEST_DURATION),
            _tails("gRPC calls", names.CALL_DURATION),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Acceptance rate",
                "percentunit",
                (
                    (
                        ratio(names.ACCEPTED, names.DRAFTED, names.ATTR_DRAFTER, _WINDOW),
                        f"{{{{{label(names.ATTR_DRAFTER)}}}}}",
                    ),
                ),
                "Accepted over drafted tokens.",
            ),
            Panel(
                "Acceptance length",
                "short",
                ((_LENGTH, f"{{{{{label(names.ATTR_DRAFTER)}}}}}"),),
                "Tokens per verify step, the target's own included.",
            ),
            Panel(
                "Drift of the acceptance length",
                "percentunit",
                (
                    (
                        f"max by ({label(names.ATTR_DRAFTER)}) "
                        f"({prometheus_name(names.ACCEPTANCE_DROP)})",
                        f"{{{{{label(names.ATTR_DRAFTER)}}}}}",
                    ),
                ),
                names.ACCEPTANCE_DROP.description,
            ),
            Panel(
                "Acceptance by position",
                "percentunit",
                (
                    (
                        ratio(
                            names.ACCEPTED_BY_POSITION,
                            names.DRAFTED_BY_POSITION,
                            names.ATTR_POSITION,
                            _WINDOW,
                        ),
                        f"position {{{{{label(names.ATTR_POSITION)}}}}}",
                    ),
                ),
            ),
            Panel(
                "Tokens per step and row",
                "short",
                ((_MEAN_TOKENS, "mean"),),
                names.TOKENS_PER_STEP.description,
            ),
            Panel(
                "Tokens drafted (K)",
                "short",
                (
                    (quantile(0.5, names.DRAFT_LENGTH), "median"),
                    (quantile(0.9, names.DRAFT_LENGTH), "p90"),
                ),
                names.DRAFT_LENGTH.description,
            ),
            Panel(
                "Draft tokens and their fate",
                "short",
                (
                    (rate(names.DRAFTED), "drafted"),
                    (rate(names.ACCEPTED), "accepted"),
                    (rate(names.EMITTED_ACCEPTED), "accepted and emitted"),
                ),
            ),
            _by(names.DECISIONS, names.ATTR_DECISION, "Rows that draft, and that do not", "short"),
            _by(names.DRAFTER_EVENTS, names.ATTR_DRAFTER_EVENT, "Fall-backs of drafters", "short"),
            _by(names.AUDITS, names.ATTR_VERDICT, "Audit verdicts", "reqps"),
            Panel(
                "Audits that gave way",
                "reqps",
                ((rate(names.AUDITS_DROPPED), "dropped"),),
                names.AUDITS_DROPPED.description,
            ),
            Panel(
                "Breaker of speculation",
                "short",
                (
                    (f"max ({prometheus_name(names.BREAKER_OPEN)})", "open"),
                    (
                        rate(names.BREAKER_CHANGES, names.ATTR_BREAKER_STATE),
                        f"to {{{{{label(names.ATTR_BREAKER_STATE)}}}}}",
                    ),
                ),
                names.BREAKER_OPEN.description,
            ),
        ),
    ),
    (
        "Load",
        (
            _by(names.REQUESTS, names.ATTR_OUTCOME, "Requests by outcome", "reqps"),
            _by(names.REJECTS, names.ATTR_REASON, "Refused requests by reason", "reqps"),
            Panel(
                "Rows and queue",
                "short",
                (
                    (f"sum ({prometheus_name(names.ROWS)})", "running"),
                    (f"sum ({prometheus_name(names.QUEUE_DEPTH)})", "waiting"),
                ),
            ),
            Panel(
                "Cache blocks",
                "short",
                (
                    (
                        f"sum by ({label(names.ATTR_STATE)}) ({prometheus_name(names.BLOCKS)})",
                        f"{{{{{label(names.ATTR_STATE)}}}}}",
                    ),
                ),
            ),
            _by(names.TOKENS, names.ATTR_GEN_AI_TOKEN_TYPE, "Tokens", "short"),
            _by(names.PREFIX_LOOKUPS, names.ATTR_CACHE_RESULT, "Prefix cache", "reqps"),
            Panel(
                "Goodput and preemptions",
                "short",
                (
                    (f"sum ({prometheus_name(names.GOODPUT)})", "tokens per busy second"),
                    (rate(names.PREEMPTIONS), "preemptions"),
                ),
            ),
            _tails("Step duration", names.STEP_DURATION),
            _by(names.STEP_PHASE_TIME, names.ATTR_PHASE, "Where step time goes", "percentunit"),
        ),
    ),
    (
        "Cost, energy and ledger",
        (
            _by(names.COST, names.ATTR_PART, "Cost per second by part", "currencyUSD"),
            Panel(
                "Power",
                "watt",
                (
                    (
                        rate(names.ENERGY, names.ATTR_ENERGY_SOURCE),
                        f"{{{{{label(names.ATTR_ENERGY_SOURCE)}}}}}",
                    ),
                    (f"min ({prometheus_name(names.ENERGY_SOURCE_UP)})", "source answers"),
                ),
                "Nothing is drawn while the energy is unknown.",
            ),
            Panel(
                "Ledger lag and queue",
                "short",
                (
                    (f"max ({prometheus_name(names.LEDGER_LAG)})", "lag in seconds"),
                    (f"sum ({prometheus_name(names.LEDGER_QUEUE)})", "records waiting"),
                ),
            ),
            Panel(
                "Ledger writing",
                "short",
                (
                    (rate(names.LEDGER_RECORDS), "written"),
                    (rate(names.LEDGER_SPILLED), "to the journal"),
                    (rate(names.LEDGER_LOST), "lost"),
                ),
            ),
            Panel(
                "Journal size",
                "bytes",
                ((f"sum ({prometheus_name(names.LEDGER_JOURNAL_BYTES)})", "journal"),),
            ),
            _by(names.EXPORT_FAILURES, names.ATTR_KIND, "Telemetry export failures", "short"),
            _by(names.CAPTURED_PROMPTS, names.ATTR_CAPTURE_RESULT, "Captured prompts", "short"),
        ),
    ),
)


def dashboard() -> str:
    """The dashboard as JSON that Grafana imports; it asks for the Prometheus data source."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, charts in ROWS:
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        for index, chart in enumerate(charts):
            x = index * _PANEL_WIDTH % _COLUMNS
            panels.append(_chart(len(panels) + 1, chart, x, y))
            if x + _PANEL_WIDTH == _COLUMNS or index == len(charts) - 1:
                y += _PANEL_HEIGHT
    document = {
        "title": "Tandem",
        "uid": "tandem",
        "tags": ["generated", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": _COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place}


def _chart(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": _PANEL_WIDTH, "h": _PANEL_HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
