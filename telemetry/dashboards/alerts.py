"""The alert rules: what somebody must look at, and what to do then."""

import json
from dataclasses import dataclass

from telemetry import names
from telemetry.dashboards.promql import label, prometheus_name, quantile, rate, ratio


@dataclass(frozen=True, slots=True)
class Alert:
    """One Prometheus rule. `after` is how long the expression must hold."""

    name: str
    expression: str
    after: str
    severity: str
    summary: str
    action: str


def _increase(metric: str, window: str) -> str:
    return f"sum (increase({metric}[{window}]))"


_DIVERGENCES = f'{prometheus_name(names.AUDITS)}{{{label(names.ATTR_VERDICT)}="divergence"}}'

ALERTS = (
    Alert(
        "TandemDivergence",
        f"{_increase(_DIVERGENCES, '15m')} > 0",
        "0m",
        "critical",
        "An audited output differs from what the target model alone would have written.",
        "Read the audit results of the ledger; switch speculation off until it is explained.",
    ),
    Alert(
        "TandemBreakerOpen",
        f"max ({prometheus_name(names.BREAKER_OPEN)}) > 0",
        "0m",
        "warning",
        "Divergences have switched speculation off; outputs are those of the target, and slower.",
        "Read the audit results of the ledger; the breaker tries again by itself.",
    ),
    Alert(
        "TandemAcceptanceDrop",
        f"{ratio(names.ACCEPTED, names.DRAFTED, None, '1h')} < 0.7 * "
        f"({ratio(names.ACCEPTED, names.DRAFTED, None, '1d')})",
        "30m",
        "warning",
        "The acceptance rate of the last hour is 30 % below that of the last day.",
        "Compare by drafter and variant: a new drafter, or traffic that it was not trained on.",
    ),
    Alert(
        "TandemAcceptanceDrift",
        f"max ({prometheus_name(names.ACCEPTANCE_DROP)}) > 0.05",
        "1h",
        "warning",
        "A drafter's acceptance length has been 5 % below its usual one for an hour.",
        "Retrain the drafter on recent requests; its log line says with which commands.",
    ),
    Alert(
        "TandemTtftHigh",
        f"{quantile(0.99, names.TTFT, '5m')} > 5",
        "10m",
        "warning",
        "The 99th percentile of the time to the first token is above 5 seconds.",
        "Look at the queue depth and the share of long prompts; add replicas or lower admission.",
    ),
    Alert(
        "TandemTpotHigh",
        f"{quantile(0.99, names.TPOT, '5m')} > 0.5",
        "10m",
        "warning",
        "The 99th percentile of the time per output token is above half a second.",
        "Look at the rows per step and the step duration: the machine is full or throttled.",
    ),
    Alert(
        "TandemLedgerLag",
        f"max ({prometheus_name(names.LEDGER_LAG)}) > 300",
        "5m",
        "warning",
        "Ledger records have been waiting for the database for more than five minutes.",
        "Bring the database back; records wait in the journal until its size cap.",
    ),
    Alert(
        "TandemLedgerLost",
        f"{_increase(prometheus_name(names.LEDGER_LOST), '15m')} > 0",
        "0m",
        "critical",
        "Ledger records could be written neither to the database nor to the journal.",
        "Free disk space or raise the journal's cap; the log names what was lost.",
    ),
    Alert(
        "TandemEnergySourceLost",
        f"min ({prometheus_name(names.ENERGY_SOURCE_UP)}) == 0",
        "5m",
        "warning",
        "The energy counter that was found at the start does not answer any more.",
        "Energy is unknown (NULL) until it is back; look at the driver.",
    ),
    Alert(
        "TandemTelemetryExportFailing",
        f"{rate(names.EXPORT_FAILURES, None, '10m')} > 0",
        "10m",
        "warning",
        "The collector does not take spans or metrics.",
        "Look at the collector; requests and the ledger are not affected.",
    ),
)


def alert_rules() -> str:
    """The rules as the YAML file that Prometheus loads."""
    lines = [
        "# Generated from telemetry/names.py by: python -m telemetry.dashboards.generate",
        "groups:",
        "  - name: tandem",
        "    rules:",
    ]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expression)}",
            f"        for: {alert.after}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          action: {json.dumps(alert.action)}",
        ]
    return "\n".join(lines) + "\n"
