"""Measures of equivalence and of data quality."""

from exports.powerbi.measure import (
    EQUIVALENCE,
    NUMBER,
    RECONCILIATION,
    SMALL_DOLLARS,
    Measure,
)

EQUALITY = (
    Measure(
        EQUIVALENCE,
        "Audited Requests",
        "Equivalence",
        f"SUM({EQUIVALENCE}[Requests Count])",
        "SELECT coalesce(sum(num_requests), 0) FROM fact_equivalence",
        NUMBER,
        "Requests whose tokens were checked against the target alone",
    ),
    Measure(
        EQUIVALENCE,
        "Checked Tokens",
        "Equivalence",
        f"SUM({EQUIVALENCE}[Checked Tokens Count])",
        "SELECT coalesce(sum(num_checked_tokens), 0) FROM fact_equivalence",
        NUMBER,
        "Tokens checked",
    ),
    *(
        Measure(
            EQUIVALENCE,
            name,
            "Equivalence",
            f'COALESCE(CALCULATE([Audited Requests], KEEPFILTERS({EQUIVALENCE}[Verdict] = "{v}"))'
            ", 0)",
            f"SELECT coalesce(sum(num_requests), 0) FROM fact_equivalence WHERE verdict = '{v}'",
            NUMBER,
            description,
        )
        for name, v, description in (
            ("Exact Requests", "exact", "Every token equal"),
            ("Numeric Ties", "numeric_tie", "Differs where the target itself cannot tell"),
            ("Divergences", "divergence", "Differs: a defect"),
        )
    ),
    Measure(
        EQUIVALENCE,
        "Exact Share",
        "Equivalence",
        "DIVIDE([Exact Requests], [Audited Requests])",
        "SELECT sum(num_requests) FILTER (verdict = 'exact') / nullif(sum(num_requests), 0) "
        "FROM fact_equivalence",
        "0.00%",
        "Share of audited requests whose every token equals the target's",
    ),
)


QUALITY = (
    Measure(
        RECONCILIATION,
        "Rows Missing",
        "Data quality",
        f"SUM({RECONCILIATION}[Ledger Requests]) - SUM({RECONCILIATION}[Exported Requests])",
        "SELECT sum(num_ledger_requests - num_exported_requests) FROM fact_reconciliation",
        NUMBER,
        "Requests of the ledger less those exported: 0 in every published export",
    ),
    Measure(
        RECONCILIATION,
        "Cost Difference USD",
        "Data quality",
        f"DIVIDE(SUM({RECONCILIATION}[Ledger Cost Nano USD]) - "
        f"SUM({RECONCILIATION}[Exported Cost Nano USD]), 1000000000)",
        "SELECT sum(ledger_cost_nano_usd - exported_cost_nano_usd) / 1e9 FROM fact_reconciliation",
        SMALL_DOLLARS,
        "Cost in the ledger less cost exported: 0 in every published export",
    ),
    *(
        Measure(
            RECONCILIATION,
            f"Requests without {label}",
            "Data quality",
            f"SUM({RECONCILIATION}[Without {label}])",
            f"SELECT coalesce(sum(num_without_{label.lower()}), 0) FROM fact_reconciliation",
            NUMBER,
            f"Requests whose {label.lower()} is unknown",
        )
        for label in ("Price", "Energy", "Model", "Tenant")
    ),
    Measure(
        RECONCILIATION,
        "Last Recorded",
        "Data quality",
        f"MAX({RECONCILIATION}[Last Recorded At])",
        "SELECT max(last_recorded_at) FROM fact_reconciliation",
        "yyyy-mm-dd hh:nn:ss",
        "When the newest exported row entered the ledger (UTC)",
    ),
)
