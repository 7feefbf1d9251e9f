"""Real databases for the ledger's tests: a SQLite file, and PostgreSQL where there is one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from sqlalchemy import URL, create_engine, make_url, text

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


@pytest.fixture(scope="session")
def migrated_template(postgres: PostgresServer | None) -> Iterator[str]:
    """The name of a migrated database, of which copies are made in no time."""
    with _database(_admin_url(postgres)) as url:
        migrate(url)
        yield str(make_url(url).database)


@pytest.fixture
def postgres_url(postgres: PostgresServer | None) -> Iterator[str]:
    """An empty database."""
    with _database(_admin_url(postgres)) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables, of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A migrated ledger, of either kind."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/ledger.db"
        migrate(url)
        yield url
        return
    admin = _admin_url(request.getfixturevalue("postgres"))
    with _database(admin, request.getfixturevalue("migrated_template")) as url:
        yield url


def _admin_url(postgres: PostgresServer | None) -> URL:
    """A server on which databases may be created; skips where there is none."""
    url = os.environ.get("TANDEM_TEST_POSTGRES_URL") or (postgres.url if postgres else "")
    if not url:
        pytest.skip(NO_POSTGRES)
    return make_url(url).set(drivername="postgresql+psycopg")


@contextmanager
def _database(admin_url: URL, template: str = "template1") -> Iterator[str]:
    name = f"tandem_{uuid4().hex[:12]}"
    admin = create_engine(admin_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    yield admin_url.set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
