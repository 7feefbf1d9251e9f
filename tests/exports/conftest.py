"""The PostgreSQL server is that of the ledger's tests."""

from tests.telemetry.conftest import postgres, postgres_url

__all__ = ["postgres", "postgres_url"]
