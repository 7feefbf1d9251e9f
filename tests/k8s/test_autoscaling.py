"""Autoscalers ask for metrics that servers have, and react in time."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import service.recording
from telemetry.dashboards.promql import prometheus_name
from telemetry.names import METRICS
from tests.k8s.manifests import K8S, Resource, build, named, of_kind, server_settings

MONITORING = K8S / "components" / "monitoring"
SERIES = {
    prometheus_name(spec) + suffix
    for spec in METRICS
    for suffix in ("", "_sum", "_count", "_bucket")
}


def _metrics_asked_for(resources: list[Resource]) -> set[str]:
    asked = {
        metric["pods"]["metric"]["name"]
        for scaler in of_kind(resources, "HorizontalPodAutoscaler")
        for metric in scaler["spec"]["metrics"]
    }
    for scaler in of_kind(resources, "ScaledObject"):
        for trigger in scaler["spec"]["triggers"]:
            asked |= set(re.findall(r"\b(tandem_\w+)", trigger["metadata"]["query"]))
    return asked


def _recorded(resources: list[Resource]) -> dict[str, str]:
    """Names that Prometheus computes, with their expressions."""
    return {
        rule["record"]: rule["expr"]
        for found in of_kind(resources, "PrometheusRule")
        for group in found["spec"]["groups"]
        for rule in group["rules"]
        if "record" in rule
    }


def test_autoscalers_ask_for_metrics_that_exist(resources: list[Resource]) -> None:
    recorded = _recorded(resources)
    asked = _metrics_asked_for(resources)
    assert asked <= {prometheus_name(spec) for spec in METRICS} | recorded.keys()
    for expression in recorded.values():
        assert set(re.findall(r"\btandem_\w+", expression)) <= SERIES


@pytest.mark.parametrize("overlay", ["prod-gpu", "prod-gpu-keda"])
def test_production_scales_by_the_queue_the_rows_and_the_goodput(overlay: str) -> None:
    expected = {"tandem_queue_depth", "tandem_rows", "tandem_goodput_share"}
    assert _metrics_asked_for(build(overlay)) == expected


def test_the_adapter_offers_what_the_autoscaler_asks_for() -> None:
    (rule,) = yaml.safe_load((MONITORING / "adapter-values.yaml").read_text())["rules"]["custom"]
    (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    asked = _metrics_asked_for(build("prod-gpu"))
    assert {name for name in asked if re.fullmatch(pattern, name)} == asked
    assert not re.fullmatch(pattern, "tandem_rows_total")
    # Each series carries these labels, by which the autoscaler finds the pods of its Deployment.
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}


def _shares(folder: Path, series: dict[str, str], expected: dict[str, dict[str, float]]) -> None:
    """Evaluate the rule on series of 15 seconds, by metric{pod}, and compare it at instants."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: the rule cannot be evaluated")
    rules = named(build("prod-gpu"), "PrometheusRule", "tandem-autoscaling")["spec"]
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    labels = 'namespace="tandem",service="tandem-metrics"'
    given = [
        {"series": name.replace("{", "{" + labels + ',pod="').replace("}", '"}'), "values": values}
        for name, values in series.items()
    ]
    asked = [
        {
            "expr": "tandem_goodput_share",
            "eval_time": at,
            "exp_samples": [
                {
                    "labels": f'tandem_goodput_share{{namespace="tandem",pod="{pod}"}}',
                    "value": value,
                }
                for pod, value in shares.items()
            ],
        }
        for at, shares in expected.items()
    ]
    case = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": given, "promql_expr_test": asked}],
    }
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    checked = subprocess.run(
        [promtool, "test", "rules", "case.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_an_idle_replica_has_no_goodput_and_a_busy_one_its_share_of_the_best(
    tmp_path: Path,
) -> None:
    """Two replicas, one twice as fast; the fast one is busy half of the time, then not at all."""
    series = {
        "tandem_goodput_per_second{fast}": "100x160",
        "tandem_goodput_per_second{slow}": "50x160",
        "tandem_step_duration_seconds_sum{fast}": "0+7.5x60 450x100",
        "tandem_step_duration_seconds_sum{slow}": "0+15x160",
    }
    expected = {"10m": {"fast": 0.5, "slow": 0.5}, "30m": {"fast": 0.0, "slow": 0.5}}
    _shares(tmp_path, series, expected)


def test_replicas_that_have_generated_nothing_yet_have_a_share_of_zero(tmp_path: Path) -> None:
    series = {
        "tandem_goodput_per_second{new}": "0x40",
        "tandem_step_duration_seconds_sum{new}": "0x40",
    }
    _shares(tmp_path, series, {"8m": {"new": 0.0}})


def test_keda_grows_and_shrinks_as_the_autoscaler_does() -> None:
    autoscaler = named(build("prod-gpu"), "HorizontalPodAutoscaler", "tandem")["spec"]
    scaled = named(build("prod-gpu-keda"), "ScaledObject", "tandem")["spec"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == autoscaler["behavior"]
    assert scaled["maxReplicaCount"] == autoscaler["maxReplicas"]
    thresholds = [float(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]]
    targets = [metric["pods"]["target"]["averageValue"] for metric in autoscaler["metrics"]]
    assert thresholds == [
        float(target.removesuffix("m")) / (1000 if target.endswith("m") else 1)
        for target in targets
    ]


def test_autoscalers_react_before_the_rows_are_full(
    resources: list[Resource], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = server_settings(resources, monkeypatch).max_num_rows
    targets: list[str] = []
    for scaler in of_kind(resources, "HorizontalPodAutoscaler"):
        targets += [
            metric["pods"]["target"]["averageValue"]
            for metric in scaler["spec"]["metrics"]
            if metric["pods"]["metric"]["name"] == "tandem_rows"
        ]
        assert scaler["spec"]["maxReplicas"] <= service.recording._MAX_JOURNALS
    for scaler in of_kind(resources, "ScaledObject"):
        targets += [
            trigger["metadata"]["threshold"]
            for trigger in scaler["spec"]["triggers"]
            if "tandem_rows" in trigger["metadata"]["query"]
        ]
        assert scaler["spec"]["maxReplicaCount"] <= service.recording._MAX_JOURNALS
        assert scaler["spec"]["minReplicaCount"] >= 1  # scaling to zero is a choice
    for target in targets:
        assert 0.5 * rows <= int(target) <= 0.8 * rows
