"""What a measure is: DAX, and the same value in SQL over the Parquet tables.

The SQL (DuckDB's dialect, over views named as the tables) is what the tests compare with the
ledger, and what the HTML report shows; the DAX says the same to Power BI.
"""

from dataclasses import dataclass

REQUESTS = "Requests"
ACCEPTANCE = "Acceptance"
LATENCY = "Latency Histogram"
CAPACITY = "Capacity"
EQUIVALENCE = "Equivalence"
RECONCILIATION = "Reconciliation"


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure. `folder` groups it in Power BI's field list; `sql` has one row, one column."""

    table: str
    name: str
    folder: str
    dax: str
    sql: str
    format: str
    description: str


NUMBER, DECIMAL, PERCENT = "#,0", "#,0.00", "0.0%"
DOLLARS, SMALL_DOLLARS = r"\$#,0.00", r"\$#,0.000000"
SECONDS = "#,0.000"


def sum_of(column: str) -> str:
    """DAX that sums a column of the requests."""
    return f"SUM({REQUESTS}[{column}])"
