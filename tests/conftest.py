"""Fixtures that every package's tests may use."""

from pathlib import Path

import pytest

from service.models import ModelError, default_home, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the pulled SmolLM2-135M-Instruct; for tests marked `model`."""
    try:
        return Path(resolve_model("smollm2-135m-instruct", default_home()))
    except ModelError as error:
        pytest.skip(str(error))
