"""Dashboard and alerts: current, about metrics that exist, and accepted by Prometheus itself."""

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from telemetry import names
from telemetry.dashboards.alerts import ALERTS
from telemetry.dashboards.generate import FOLDER, generated_files
from telemetry.dashboards.grafana import ROWS
from telemetry.dashboards.promql import label, prometheus_name
from telemetry.instruments import create_instrument
from telemetry.names import Instrument
from telemetry.otel import OtelConfig, start_telemetry

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: install Debian's `prometheus`"
)

RULE_TESTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - series: 'tandem_audit_results_total{{tandem_audit_verdict="divergence"}}'
        values: '0 0 0 1 1 1'
      - series: 'tandem_audit_results_total{{tandem_audit_verdict="exact"}}'
        values: '0 10 20 30 40 50'
      - series: 'tandem_ledger_lag_seconds'
        values: '400x20'
      - series: 'tandem_energy_source_up{{tandem_energy_source="rapl"}}'
        values: '1 1 0x20'
    alert_rule_test:
      - {{eval_time: 2m, alertname: TandemDivergence, exp_alerts: []}}
      - eval_time: 4m
        alertname: TandemDivergence
        exp_alerts: [{{exp_labels: {{severity: critical}}, exp_annotations: {annotations}}}]
      - {{eval_time: 4m, alertname: TandemLedgerLag, exp_alerts: []}}
      - eval_time: 6m
        alertname: TandemLedgerLag
        exp_alerts: [{{exp_labels: {{severity: warning}}, exp_annotations: {lag}}}]
      - {{eval_time: 6m, alertname: TandemEnergySourceLost, exp_alerts: []}}
      - eval_time: 8m
        alertname: TandemEnergySourceLost
        exp_alerts: [{{exp_labels: {{severity: warning}}, exp_annotations: {energy}}}]
      - {{eval_time: 8m, alertname: TandemLedgerLost, exp_alerts: []}}
"""


def _annotations(name: str) -> str:
    alert = next(alert for alert in ALERTS if alert.name == name)
    return json.dumps({"summary": alert.summary, "action": alert.action})


def _queries() -> list[str]:
    charts = [query for _, panels in ROWS for panel in panels for query, _ in panel.queries]
    return charts + [alert.expression for alert in ALERTS]


def test_the_committed_files_are_those_that_names_give() -> None:
    for name, content in generated_files().items():
        path = FOLDER / name
        assert path.read_text(encoding="utf-8") == content, (
            f"{path} is out of date: python -m telemetry.dashboards.generate"
        )


def test_prometheus_shows_the_names_that_the_queries_use() -> None:
    telemetry = start_telemetry(OtelConfig(prometheus_port=0))
    for spec in names.METRICS:
        instrument = create_instrument(telemetry.meter, spec)
        record = {
            Instrument.COUNTER: "add",
            Instrument.GAUGE: "set",
            Instrument.HISTOGRAM: "record",
        }[spec.instrument]
        getattr(instrument, record)(1)
    url = f"http://127.0.0.1:{telemetry.prometheus_port}/metrics"
    with urllib.request.urlopen(url) as answer:
        shown = set(re.findall(r"^# TYPE (\S+)", answer.read().decode(), re.MULTILINE))
    telemetry.close()
    assert {prometheus_name(spec) for spec in names.METRICS} == shown - {"target_info"}


def test_every_query_is_about_declared_metrics_and_their_attributes() -> None:
    series = set()
    labels = {"le"}
    for spec in names.METRICS:
        name = prometheus_name(spec)
        is_histogram = spec.instrument is Instrument.HISTOGRAM
        series |= (
            {f"{name}{tail}" for tail in ("_bucket", "_sum", "_count")} if is_histogram else {name}
        )
        labels |= {label(attribute) for attribute in spec.attributes}
    for query in _queries():
        for word in re.findall(r"\b(?:tandem|gen_ai|rpc)_\w+", query):
            assert word in series | labels, f"{word} in {query}"


def test_every_metric_is_on_the_dashboard() -> None:
    queries = " ".join(_queries())
    missing = {s.name for s in names.METRICS if prometheus_name(s) not in queries}
    assert missing == set()


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(generated_files()["grafana.json"])["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@needs_promtool
def test_prometheus_accepts_the_rules_and_they_fire(tmp_path: Path) -> None:
    rules = FOLDER / "alerts.yaml"
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        RULE_TESTS.format(
            rules=rules,
            annotations=_annotations("TandemDivergence"),
            lag=_annotations("TandemLedgerLag"),
            energy=_annotations("TandemEnergySourceLost"),
        )
    )
    for arguments in (["check", "rules", str(rules)], ["test", "rules", str(tests)]):
        done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_can_parse_every_chart(tmp_path: Path) -> None:
    rules = {
        "groups": [
            {
                "name": "charts",
                "rules": [
                    {"record": f"chart_{n}", "expr": query.replace("$__rate_interval", "5m")}
                    for n, query in enumerate(_queries())
                ],
            }
        ]
    }
    path = tmp_path / "charts.yaml"
    path.write_text(json.dumps(rules))
    done = subprocess.run([PROMTOOL, "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
