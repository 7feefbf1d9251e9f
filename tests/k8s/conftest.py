"""Every test of a manifest runs on every overlay."""

import pytest

from tests.k8s.manifests import OVERLAYS, Resource, build


@pytest.fixture(params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return build(request.param)
