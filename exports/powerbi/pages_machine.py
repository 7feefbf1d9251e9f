"""Pages on the machine and on trust: energy, capacity, equivalence, A-B, data quality."""

from exports.powerbi.pages import (
    COLUMNS,
    DATE,
    DRAFTER,
    HOUR,
    LINE,
    LOW_LEFT,
    LOW_RIGHT,
    LOW_WIDE,
    MODEL,
    POSITION,
    STACKED,
    TOP_LEFT,
    TOP_RIGHT,
    TOP_WIDE,
    VARIANT,
    VERDICT,
    WEEKDAY,
    Page,
    cards,
    chart,
    measure,
    table,
)

MACHINE_PAGES = (
    Page(
        "energy",
        "Energy",
        (
            *cards(
                "Active Energy Wh",
                "Idle Energy Wh",
                "Energy per Token J",
                "Energy Coverage",
                "Embodied Cost USD",
                "Embodied Cost Share",
            ),
            chart(
                STACKED,
                "Measured energy (Wh)",
                DATE,
                ("Active Energy Wh", "Idle Energy Wh"),
                TOP_WIDE,
            ),
            chart(LINE, "Joules per output token", DATE, ("Energy per Token J",), LOW_LEFT, MODEL),
            chart(
                LINE,
                "Share of requests whose energy was measured",
                DATE,
                ("Energy Coverage",),
                LOW_RIGHT,
            ),
        ),
    ),
    Page(
        "capacity",
        "Capacity",
        (
            *cards("Utilisation", "Busy Hours", "Idle Hours", "Lost Hours"),
            chart(LINE, "Utilisation", DATE, ("Utilisation",), TOP_LEFT),
            chart(
                COLUMNS, "Utilisation by hour of the day, UTC", HOUR, ("Utilisation",), TOP_RIGHT
            ),
            chart(
                COLUMNS,
                "Most requests running and waiting",
                DATE,
                ("Peak Running", "Peak Waiting"),
                LOW_LEFT,
            ),
            chart(COLUMNS, "Requests by weekday", WEEKDAY, ("Requests",), LOW_RIGHT),
        ),
    ),
    Page(
        "equivalence",
        "Equivalence",
        (
            *cards("Exact Share", "Audited Requests", "Numeric Ties", "Divergences"),
            chart(STACKED, "Audits by verdict", DATE, ("Audited Requests",), TOP_WIDE, VERDICT),
            chart(COLUMNS, "Divergences by day", DATE, ("Divergences",), LOW_LEFT, VARIANT),
            table(
                "By model, drafter and variant",
                (
                    MODEL,
                    DRAFTER,
                    VARIANT,
                    measure("Audited Requests"),
                    measure("Exact Share"),
                    measure("Divergences"),
                ),
                LOW_RIGHT,
            ),
        ),
    ),
    Page(
        "ab",
        "A-B comparison",
        (
            table(
                "Variants side by side",
                (
                    VARIANT,
                    measure("Requests"),
                    measure("Acceptance Length"),
                    measure("Acceptance Length vs Default"),
                    measure("Tokens per Step"),
                    measure("TPOT P95 (s)"),
                    measure("Cost per 1M Tokens USD"),
                    measure("Divergences"),
                ),
                (0, 0, 12, 4),
            ),
            chart(LINE, "Acceptance length", DATE, ("Acceptance Length",), (0, 4, 6, 5), VARIANT),
            chart(
                LINE,
                "Time per output token, P95 (s)",
                DATE,
                ("TPOT P95 (s)",),
                (6, 4, 6, 5),
                VARIANT,
            ),
            chart(
                LINE,
                "Cost per million output tokens (USD)",
                DATE,
                ("Cost per 1M Tokens USD",),
                (0, 9, 6, 5),
                VARIANT,
            ),
            chart(
                COLUMNS,
                "Acceptance rate by place in the draft",
                POSITION,
                ("Acceptance Rate at Position",),
                (6, 9, 6, 5),
                VARIANT,
            ),
        ),
    ),
    Page(
        "quality",
        "Data quality",
        (
            *cards("Rows Missing", "Cost Difference USD", "Energy Coverage", "Last Recorded"),
            chart(
                COLUMNS,
                "Requests with something unknown",
                DATE,
                (
                    "Requests without Price",
                    "Requests without Energy",
                    "Requests without Model",
                    "Requests without Tenant",
                ),
                TOP_WIDE,
            ),
            table(
                "By day",
                (
                    DATE,
                    measure("Requests"),
                    measure("Rows Missing"),
                    measure("Cost Difference USD"),
                    measure("Energy Coverage"),
                    measure("Last Recorded"),
                ),
                LOW_WIDE,
            ),
        ),
    ),
)
