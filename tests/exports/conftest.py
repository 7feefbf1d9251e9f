"""The PostgreSQL server is that of the ledger's tests; files need not outlive a power failure."""

import os

import pytest

from tests.telemetry.conftest import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
