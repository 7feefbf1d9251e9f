"""Opening the ledger's database and bringing its schema up to date."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.pool import ConnectionPoolEntry

BUSY_TIMEOUT_SECONDS = 30.0
MIGRATION_LOCK = 0x74616E64656D  # "tandem": one number per application by convention
MIGRATIONS = Path(__file__).parent / "migrations"


class LedgerSchemaError(RuntimeError):
    """The database's schema is not the one that this version reads and writes."""


def open_ledger(url: str, *, read_only: bool = False) -> Engine:
    """Engine for `sqlite:///path` or `postgresql://...` (psycopg 3); connects on first use.

    SQLite runs in WAL mode with foreign keys and a busy timeout, so readers never block the
    writer. `read_only` refuses writes in the database itself. Raises ValueError for any other
    kind of database. Its errors quote statements, never the values of a row: they are logged.
    """
    parsed = _with_driver(url)
    if parsed.get_backend_name() == "sqlite":
        engine = create_engine(
            parsed, connect_args={"timeout": BUSY_TIMEOUT_SECONDS}, hide_parameters=True
        )
        event.listen(engine, "connect", _sqlite_read_only if read_only else _sqlite_read_write)
        event.listen(engine, "begin", _sqlite_begin if read_only else _sqlite_begin_immediate)
        return engine
    arguments: dict[str, object] = {
        "application_name": "tandem",
        "connect_timeout": 5,
        # A network that swallows packets must look like a failure within seconds.
        "tcp_user_timeout": 15_000,
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 2,
    }
    if read_only:
        arguments["options"] = "-c default_transaction_read_only=on"
    return create_engine(parsed, pool_pre_ping=True, connect_args=arguments, hide_parameters=True)


def migrate(url: str, revision: str = "head") -> None:
    """Bring the schema up (or down) to `revision`; "base" removes everything.

    Two servers that start at once are safe on PostgreSQL (advisory lock) and on SQLite (one
    writer at a time). Creates a missing SQLite file and its folder.
    """
    parsed = _with_driver(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database not in (None, "", ":memory:"):
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = open_ledger(url)
    try:
        with engine.connect() as connection, connection.begin():
            if engine.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            config = _alembic_config()
            config.attributes["connection"] = connection
            if revision == "base":
                command.downgrade(config, revision)
            else:
                command.upgrade(config, revision)
    finally:
        engine.dispose()


def schema_revision(engine: Engine) -> str | None:
    """The revision that the database is at; None before the first migration."""
    with engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def head_revision() -> str:
    """The revision that this version of the code reads and writes."""
    head = ScriptDirectory.from_config(_alembic_config()).get_current_head()
    if head is None:
        raise LedgerSchemaError("this installation contains no migrations")
    return head


def require_current_schema(engine: Engine) -> None:
    """Raises LedgerSchemaError, saying what to run, unless the schema is the current one."""
    found, expected = schema_revision(engine), head_revision()
    if found != expected:
        raise LedgerSchemaError(
            f"the ledger's schema is at {found or 'nothing'}, this version needs {expected}: "
            "run `tandem ledger migrate`"
        )


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    return config


def _with_driver(url: str) -> URL:
    parsed = make_url(url)
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ValueError(f"a ledger lives in SQLite or PostgreSQL, not in {parsed.drivername!r}")
    return parsed


def _sqlite_read_write(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = _sqlite_cursor(connection)
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")  # a commit survives power loss, not only a kill
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _sqlite_read_only(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    cursor = _sqlite_cursor(connection)
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _sqlite_cursor(connection: DBAPIConnection) -> DBAPICursor:
    # The driver's own implicit BEGIN opens a read transaction, which cannot become a writing
    # one while another process writes; transactions are begun by the listeners below instead.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_SECONDS * 1000)}")
    return cursor


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN")


def _sqlite_begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
