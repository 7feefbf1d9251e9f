"""Every resource is what the API server and the operators accept."""

import json
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

from tests.k8s.custom_schemas import SCHEMAS
from tests.k8s.manifests import MULTI_NODE, OVERLAYS, TRAINING, Resource, build, of_kind

OLDEST, NEWEST = "1.30", "1.37"  # the oldest with preStop sleep, and the newest that was tried
MODELS = {
    "ScaledObject": keda.ScaledObject,
    "ServiceMonitor": prometheus.ServiceMonitor,
    "PrometheusRule": prometheus.PrometheusRule,
}


@cache
def _everything() -> list[Resource]:
    """The resources of all overlays and of what is applied beside them, each once."""
    found = {
        json.dumps(resource): resource
        for name in (*OVERLAYS, *TRAINING, MULTI_NODE, "experiment")
        for resource in build(name)
    }
    return list(found.values())


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_resources_fit_the_official_schemas(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache(kubernetes_validate.utils.schema_contents)  # megabytes, for every resource
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", read)
    templates = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": found}
        for groups in of_kind(_everything(), "LeaderWorkerSet")
        for role, found in groups["spec"]["leaderWorkerTemplate"].items()
        if role in ("leaderTemplate", "workerTemplate")
    ]
    assert len(templates) == 2
    for resource in (*_everything(), *templates):
        if resource["kind"] not in SCHEMAS.keys() | MODELS.keys():
            kubernetes_validate.validate(resource, version, strict=True)


@pytest.mark.parametrize("kind", MODELS)
def test_custom_resources_fit_the_operators_models(kind: str) -> None:
    resources = of_kind(_everything(), kind)
    assert resources
    for resource in resources:
        read = MODELS[kind].model_validate(resource)  # type: ignore[attr-defined]
        known = read.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert _lost(resource["spec"], known["spec"]) == []


@pytest.mark.parametrize("kind", SCHEMAS)
def test_custom_resources_without_a_package_fit_their_references(kind: str) -> None:
    resources = of_kind(_everything(), kind)
    assert resources
    for resource in resources:
        jsonschema.validate(resource, SCHEMAS[kind])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("GRPCRoute", ["rules", 0, "matches", 0, "method", "path"], "/x"),
        ("GRPCRoute", ["rules", 0, "backendRefs", 0, "port"], 0),
        ("GRPCRoute", ["hostnames", 0], "Tandem.example.com"),
        ("SecretProviderClass", ["secretObjects", 0, "data", 0, "name"], "x"),
        ("LeaderWorkerSet", ["leaderWorkerTemplate", "restartPolicy"], "Always"),
        ("LeaderWorkerSet", ["rolloutStrategy", "maxSurge"], 1),
        ("SecretProviderClass", ["parameters", "tenantId"], 5),
    ],
)
def test_a_wrong_custom_resource_is_found(kind: str, path: list[Any], value: object) -> None:
    resource = of_kind(json.loads(json.dumps(_everything())), kind)[0]
    place = resource["spec"]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource, SCHEMAS[kind])


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


def test_a_field_that_does_not_exist_is_found() -> None:
    deployment = of_kind(build("dev-cpu"), "Deployment")[0]
    deployment["spec"]["template"]["spec"]["terminationGraceSeconds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, OLDEST, strict=True)
    assert _lost({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}) == ["spec.a[0].c"]
