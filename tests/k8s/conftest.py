"""Every test of a manifest runs on every overlay, and on the training Jobs where it fits them."""

import pytest

from tests.k8s.manifests import OVERLAYS, TRAINING, Resource, build


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return build(request.param)


@pytest.fixture(params=[*OVERLAYS, *TRAINING])
def workloads(request: pytest.FixtureRequest) -> list[Resource]:
    """Of an overlay, or of a training Job, which is applied beside one."""
    return build(request.param)
