"""The process that reads rows: statements come in as lines of JSON, Arrow streams go out.

Started by exports.arrow_reader. The first line says which database, each further one holds a
statement whose answer is one Arrow IPC stream on standard output. It ends with its input; after
an error it ends with the reason as the last line of standard error.
"""

import json
import sys
from typing import Any

import pyarrow as pa


def main() -> int:
    """Answer until the input ends. Returns the exit status."""
    lines = iter(sys.stdin.buffer.readline, b"")
    opening = json.loads(next(lines))
    is_sqlite = opening["dialect"] == "sqlite"
    options = {"adbc.sqlite.query.batch_rows": str(opening["batch_rows"])} if is_sqlite else {}
    connection = _connect(opening["dialect"], opening["database"])
    try:
        for line in lines:
            with connection.cursor(adbc_stmt_kwargs=options) as cursor:
                cursor.execute(json.loads(line)["sql"])
                batches = cursor.fetch_record_batch()
                with pa.ipc.new_stream(sys.stdout.buffer, batches.schema) as stream:
                    for batch in batches:
                        stream.write_batch(batch)
            sys.stdout.buffer.flush()
    except BrokenPipeError:
        return 0
    except (connection.Error, pa.ArrowException) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    finally:
        connection.close()
    return 0


def _connect(dialect: str, database: str) -> Any:
    if dialect == "sqlite":
        from adbc_driver_sqlite import dbapi

        connection = dbapi.connect(database)
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA query_only=ON")
            cursor.execute("PRAGMA busy_timeout=30000")
        return connection
    from adbc_driver_postgresql import dbapi as postgresql

    return postgresql.connect(database, autocommit=True)


if __name__ == "__main__":
    sys.exit(main())
