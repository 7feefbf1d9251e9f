"""Every alert in Prometheus's own rule tests: on what it fires, and on what it must not."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.generate import FOLDER
from telemetry.dashboards.promql import prometheus_name
from telemetry.names import METRICS

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: install Debian's `prometheus`"
)
DAY = 24 * 60
ACCEPTED = "tandem_speculation_accepted_tokens_total"
DRAFTED = "tandem_speculation_draft_tokens_total"
TTFT = "gen_ai_server_time_to_first_token_seconds_bucket"
TPOT = "gen_ai_server_time_per_output_token_seconds_bucket"
SPANS = 'tandem_telemetry_export_failures_total{tandem_ledger_record_kind="spans"}'
DIVERGENCE = 'tandem_audit_results_total{tandem_audit_verdict="divergence"}'
EXACT = 'tandem_audit_results_total{tandem_audit_verdict="exact"}'


@dataclass(frozen=True)
class Case:
    """Series of one value a minute: those on which the alert fires at `minute`, not before
    `not_before`, and those on which it stays silent."""

    alert: str
    firing: dict[str, str]
    quiet: dict[str, str]
    minute: int
    not_before: int


def _latencies(metric: str, bounds: tuple[str, str], num_slow_of_a_hundred: int) -> dict[str, str]:
    """A hundred requests a minute, the slow ones above the first bound."""
    fast = 100 - num_slow_of_a_hundred
    return {
        f'{metric}{{le="{bounds[0]}"}}': f"0+{fast}x60",
        f'{metric}{{le="{bounds[1]}"}}': "0+100x60",
        f'{metric}{{le="+Inf"}}': "0+100x60",
    }


def _acceptance(last_hours: int) -> dict[str, str]:
    """80 of 100 drafted tokens a minute for a day, then fewer for two hours."""
    at_the_end = 80 * DAY
    return {
        ACCEPTED: f"0+80x{DAY} {at_the_end + last_hours}+{last_hours}x120",
        DRAFTED: f"0+100x{DAY + 121}",
    }


CASES = (
    Case(
        "TandemDivergence", {DIVERGENCE: "0 0 0 1 1 1"}, {DIVERGENCE: "0x9", EXACT: "0+9x9"}, 4, 2
    ),
    Case(
        "TandemBreakerOpen",
        {"tandem_speculation_breaker_open": "0 0 0 1 1"},
        {"tandem_speculation_breaker_open": "0x9"},
        4,
        2,
    ),
    Case("TandemAcceptanceDrop", _acceptance(40), _acceptance(70), DAY + 110, DAY + 20),
    Case(
        "TandemAcceptanceDrift",
        {'tandem_speculation_acceptance_drop{tandem_speculation_drafter="head"}': "0.06x90"},
        {'tandem_speculation_acceptance_drop{tandem_speculation_drafter="head"}': "0.04x90"},
        61,
        59,
    ),
    Case(
        "TandemTtftHigh",
        _latencies(TTFT, ("5.0", "7.5"), 2),
        _latencies(TTFT, ("5.0", "7.5"), 1),
        20,
        8,
    ),
    Case(
        "TandemTpotHigh",
        _latencies(TPOT, ("0.5", "0.75"), 2),
        _latencies(TPOT, ("0.5", "0.75"), 1),
        20,
        8,
    ),
    Case(
        "TandemLedgerLag",
        {"tandem_ledger_lag_seconds": "400x20"},
        {"tandem_ledger_lag_seconds": "299x20"},
        6,
        4,
    ),
    Case(
        "TandemLedgerLost",
        {"tandem_ledger_lost_total": "0 0 0 2 2"},
        {"tandem_ledger_lost_total": "2x9"},
        4,
        2,
    ),
    Case(
        "TandemEnergySourceLost",
        {'tandem_energy_source_up{tandem_energy_source="rapl"}': "1 1 0x20"},
        {'tandem_energy_source_up{tandem_energy_source="rapl"}': "1 0 0 1x20"},
        8,
        6,
    ),
    Case("TandemTelemetryExportFailing", {SPANS: "0+1x40"}, {SPANS: "0 0 1x40"}, 30, 9),
)


def test_every_alert_has_a_case_about_series_that_exist() -> None:
    assert [case.alert for case in CASES] == [alert.name for alert in ALERTS]
    shown = [prometheus_name(spec) for spec in METRICS]
    for case in CASES:
        for series in (*case.firing, *case.quiet):
            name = series.partition("{")[0].removesuffix("_bucket")
            assert name in shown, series


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_on_its_cause_and_on_nothing_less(case: Case, tmp_path: Path) -> None:
    alert = next(alert for alert in ALERTS if alert.name == case.alert)
    fired = {
        "exp_labels": {"severity": alert.severity},
        "exp_annotations": {"summary": alert.summary, "action": alert.action},
    }
    quiet = {"alertname": case.alert, "exp_alerts": []}
    every = 10 if case.minute > DAY else 1
    looks = range(case.not_before % every, case.minute + 1, every)
    path = tmp_path / "tests.yaml"
    groups = [
        _group(
            case.firing,
            {"eval_time": f"{case.not_before}m", **quiet},
            {"eval_time": f"{case.minute}m", "alertname": case.alert, "exp_alerts": [fired]},
        ),
        _group(case.quiet, *({"eval_time": f"{minute}m", **quiet} for minute in looks)),
    ]
    rules = {"rule_files": [str(FOLDER / "alerts.yaml")], "evaluation_interval": f"{every}m"}
    path.write_text(json.dumps({**rules, "tests": groups}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _group(series: dict[str, str], *expected: object) -> dict[str, object]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": list(expected),
    }
