"""Real databases for the ledger's tests: a SQLite file, and PostgreSQL where there is one."""

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, make_url, text

from telemetry.ledger.session import migrate
from tests.telemetry.postgres_server import PostgresServer, running_postgres

NO_POSTGRES = (
    "no PostgreSQL: install Debian's `postgresql`, or set TANDEM_TEST_POSTGRES_URL to a server "
    "where databases may be created"
)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | None]:
    if os.environ.get("TANDEM_TEST_POSTGRES_URL"):
        yield None
        return
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer | None) -> Iterator[str]:
    """An empty database."""
    server_url = os.environ.get("TANDEM_TEST_POSTGRES_URL") or (postgres.url if postgres else "")
    if not server_url:
        pytest.skip(NO_POSTGRES)
    name = f"tandem_{uuid4().hex[:12]}"
    parsed = make_url(server_url).set(drivername="postgresql+psycopg")
    admin = create_engine(parsed, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield parsed.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def ledger_url(empty_url: str) -> str:
    """A migrated ledger, of either kind."""
    migrate(empty_url)
    return empty_url
