"""Marks for single values of a parameter."""

from typing import Any

import pytest


def thorough(value: Any) -> Any:
    """A value that `make test` leaves to `make test-thorough`."""
    return pytest.param(value, marks=pytest.mark.thorough)
