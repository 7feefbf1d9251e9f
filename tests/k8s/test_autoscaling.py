"""Autoscalers ask for metrics that servers have, and react in time."""

import re

import pytest

import service.recording
from telemetry.dashboards.promql import prometheus_name
from telemetry.names import METRICS
from tests.k8s.manifests import Resource, of_kind, server_settings


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


def test_autoscalers_ask_for_metrics_that_exist(resources: list[Resource]) -> None:
    assert _metrics_asked_for(resources) <= {prometheus_name(spec) for spec in METRICS}


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
