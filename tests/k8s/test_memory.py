"""Requests and limits of the pods fit the memory that was measured of what they run."""

import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from tests.k8s.manifests import (
    K8S,
    MULTI_NODE,
    OVERLAYS,
    TRAINING,
    Resource,
    build,
    environment,
    num_bytes,
    pods,
    serve_container,
)

FIGURES = tomllib.loads((K8S / "figures.toml").read_text(encoding="utf-8"))
MEMORY = FIGURES["memory"]
MB = 2**20
ROOM = 1.25  # of the limit over what was measured
NOT_OURS = {"collector"}  # its memory_limiter keeps it below its limit


def needed_bytes(resources: list[Resource], container: Mapping[str, Any]) -> float:
    """The measured peak; of a server on a CPU with its own cache full."""
    name = container["name"]
    if name == "export":
        return float(FIGURES["exports"]["peak_memory_mb"] * MB)
    if name != "serve":
        return float(MEMORY[name] * MB)
    given = float(environment(resources, container)["TANDEM_KV_CACHE_MEMORY"] or 0)
    cache = given if given > 1 else 0.0  # a share is one of a GPU's own memory
    return max(MEMORY["serve"] * MB, MEMORY["serve_start"] * MB + cache)


def too_small(resources: list[Resource]) -> list[str]:
    """Containers that ask for less memory than they were measured to need."""
    found = []
    for pod in pods(resources):
        for container in pod.containers():
            if container["name"] in NOT_OURS:
                continue
            needed = needed_bytes(resources, container)
            requested, limit = (
                num_bytes(container["resources"][kind]["memory"]) for kind in ("requests", "limits")
            )
            if requested < needed or limit < ROOM * needed:
                found.append(f"{pod.owner} {container['name']}: {needed / MB:.0f} MB are needed")
    return found


@pytest.mark.parametrize("folder", [*OVERLAYS, *TRAINING, MULTI_NODE])
def test_requests_hold_the_measured_peak_and_limits_a_quarter_more(folder: str) -> None:
    assert too_small(build(folder)) == []


def test_a_server_whose_cache_outgrows_its_memory_is_found() -> None:
    resources = build("dev-cpu")
    settings = next(r for r in resources if r["metadata"]["name"].startswith("tandem-settings-"))
    settings["data"]["TANDEM_KV_CACHE_MEMORY"] = str(2 * 2**30)
    assert [line.split(":")[0] for line in too_small(resources)] == ["Deployment/tandem serve"]
    asked = serve_container(resources)["resources"]
    asked["requests"]["memory"] = "4Gi"
    assert len(too_small(resources)) == 1  # the limit is still too low
    asked["limits"]["memory"] = "5Gi"
    assert too_small(resources) == []
