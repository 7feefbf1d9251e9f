"""Every test of a manifest runs on every overlay, and on the training Jobs where it fits them."""

import pytest

from tests.k8s.manifests import MULTI_NODE, OVERLAYS, TRAINING, Resource, build


@pytest.fixture(params=[*OVERLAYS, MULTI_NODE])
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return build(request.param)


@pytest.fixture(params=[*OVERLAYS, *TRAINING, MULTI_NODE])
def workloads(request: pytest.FixtureRequest) -> list[Resource]:
    """Of an overlay, of a training Job, which is applied beside one, or of several machines."""
    return build(request.param)
