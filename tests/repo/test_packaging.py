"""Our packages have generic names: nothing else that is installed may ship them."""

from importlib.metadata import packages_distributions

import pytest


@pytest.mark.parametrize("name", ["engine", "exports", "service", "telemetry"])
def test_a_package_name_belongs_to_tandem_alone(name: str) -> None:
    assert set(packages_distributions()[name]) == {"tandem"}
