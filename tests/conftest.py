"""Fixtures that every package's tests may use, and no way to a network."""

import logging
import os
from pathlib import Path

import pytest

# For this process and those that tests start; read when transformers is imported, hence above it.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

from service.models import ModelError, default_home, resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the pulled SmolLM2-135M-Instruct; for tests marked `model`."""
    try:
        return Path(resolve_model("smollm2-135m-instruct", default_home()))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _usual_log_level() -> None:
    """A server started in an earlier test chose what this process logs, and where to."""
    root = logging.getLogger()
    root.setLevel(logging.WARNING)
    root.handlers[:] = [h for h in root.handlers if type(h).__module__ != "telemetry.logs"]
