"""Every overlay is what the API server and the operators accept."""

from typing import Any

import kubernetes_validate
import pytest
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

from tests.k8s.manifests import Resource, of_kind

OLDEST, NEWEST = "1.30", "1.37"  # the oldest with preStop sleep, and the newest that was tried
MODELS = {
    "ScaledObject": keda.ScaledObject,
    "ServiceMonitor": prometheus.ServiceMonitor,
    "PrometheusRule": prometheus.PrometheusRule,
}
# No registry has their schemas as a Python package: test_cross_references reads them instead.
WITHOUT_SCHEMA = {"GRPCRoute", "SecretProviderClass"}


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_resources_fit_the_official_schemas(resources: list[Resource], version: str) -> None:
    for resource in resources:
        if resource["kind"] not in WITHOUT_SCHEMA | MODELS.keys():
            kubernetes_validate.validate(resource, version, strict=True)


def test_custom_resources_fit_the_operators_models(resources: list[Resource]) -> None:
    for kind, model in MODELS.items():
        for resource in of_kind(resources, kind):
            read = model.model_validate(resource)
            known = read.model_dump(mode="json", by_alias=True, exclude_none=True)
            assert _lost(resource["spec"], known["spec"]) == []


def _lost(given: Any, known: Any, where: str = "spec") -> list[str]:
    """Paths of fields that the model does not know, and so has dropped."""
    if isinstance(given, dict):
        lost = [f"{where}.{key}" for key in given.keys() - known.keys()]
        for key in given.keys() & known.keys():
            lost += _lost(given[key], known[key], f"{where}.{key}")
        return lost
    if isinstance(given, list):
        return [
            path
            for index, (a, b) in enumerate(zip(given, known, strict=True))
            for path in _lost(a, b, f"{where}[{index}]")
        ]
    return []


def test_a_field_that_does_not_exist_is_found(resources: list[Resource]) -> None:
    deployment = of_kind(resources, "Deployment")[0]
    deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)
    assert _lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}) == ["spec.a[0].c"]
