"""Measures of cost, energy and capacity."""

from exports.powerbi.measure import (
    CAPACITY,
    DECIMAL,
    DOLLARS,
    NUMBER,
    PERCENT,
    REQUESTS,
    SMALL_DOLLARS,
    Measure,
    sum_of,
)


def _dollars(name: str, column: str, source: str, description: str) -> Measure:
    return Measure(
        REQUESTS,
        name,
        "Cost",
        f"DIVIDE({sum_of(column)}, 1000000000)",
        f"SELECT sum({source}) / 1e9 FROM fact_request",
        DOLLARS,
        description,
    )


_TOTAL_COST_SQL = (
    "SELECT (coalesce((SELECT sum(cost_nano_usd) FROM fact_request), 0) + coalesce((SELECT "
    "sum(cost_idle_nano_usd + cost_lost_nano_usd) FROM fact_capacity), 0)) / 1e9"
)

# Hours first: nanoseconds times nano-USD would not fit into 64 bits.
_EMBODIED_SQL = (
    "SELECT sum(wall_nanoseconds / 3.6e12 * embodied_nano_usd_per_hour) / 1e9 "
    "FROM fact_capacity JOIN dim_price USING (price_key)"
)

COST = (
    _dollars("Active Cost USD", "Cost Nano USD", "cost_nano_usd", "Of the steps, by request"),
    _dollars("Prefill Cost USD", "Cost Prefill Nano USD", "cost_prefill_nano_usd", "Prompts"),
    _dollars("Decode Cost USD", "Cost Decode Nano USD", "cost_decode_nano_usd", "Newest tokens"),
    _dollars("Draft Cost USD", "Cost Draft Nano USD", "cost_draft_nano_usd", "Verifying drafts"),
    _dollars("Drafter Cost USD", "Cost Drafter Nano USD", "cost_drafter_nano_usd", "Drafting"),
    _dollars(
        "Rejected Cost USD",
        "Cost Rejected Nano USD",
        "cost_rejected_nano_usd",
        "Part of the draft cost whose tokens were not accepted",
    ),
    Measure(
        CAPACITY,
        "Idle Cost USD",
        "Cost",
        f"DIVIDE(SUM({CAPACITY}[Cost Idle Nano USD]), 1000000000)",
        "SELECT sum(cost_idle_nano_usd) / 1e9 FROM fact_capacity",
        DOLLARS,
        "Of the time between steps; no request pays it",
    ),
    Measure(
        CAPACITY,
        "Lost Cost USD",
        "Cost",
        f"DIVIDE(SUM({CAPACITY}[Cost Lost Nano USD]), 1000000000)",
        "SELECT sum(cost_lost_nano_usd) / 1e9 FROM fact_capacity",
        DOLLARS,
        "Of time that cannot be charged because the server was killed",
    ),
    Measure(
        CAPACITY,
        "Total Cost USD",
        "Cost",
        "[Active Cost USD] + [Idle Cost USD] + [Lost Cost USD]",
        _TOTAL_COST_SQL,
        DOLLARS,
        "Price times wall time: active, idle and lost",
    ),
    Measure(
        CAPACITY,
        "Embodied Cost USD",
        "Cost",
        f"""DIVIDE(
    SUMX(
        {CAPACITY},
        DIVIDE({CAPACITY}[Wall Nanoseconds], 3600000000000)
            * RELATED(Price[Embodied Nano USD Per Hour])
    ),
    1000000000
)""",
        _EMBODIED_SQL,
        DOLLARS,
        "The part of the total cost that the price book names as manufacture",
    ),
    Measure(
        CAPACITY,
        "Embodied Cost Share",
        "Cost",
        "DIVIDE([Embodied Cost USD], [Total Cost USD])",
        f"SELECT ({_EMBODIED_SQL}) / nullif(({_TOTAL_COST_SQL}), 0)",
        PERCENT,
        "Manufacture over the total cost",
    ),
    Measure(
        REQUESTS,
        "Cost per Request USD",
        "Cost",
        "DIVIDE([Active Cost USD], [Requests])",
        "SELECT sum(cost_nano_usd) / 1e9 / nullif(count(*), 0) FROM fact_request",
        SMALL_DOLLARS,
        "Active cost only",
    ),
    Measure(
        REQUESTS,
        "Cost per 1K Tokens USD",
        "Cost",
        "DIVIDE([Active Cost USD], [Output Tokens]) * 1000",
        "SELECT sum(cost_nano_usd) / 1e6 / nullif(sum(num_output_tokens), 0) FROM fact_request",
        SMALL_DOLLARS,
        "Active cost per thousand output tokens",
    ),
    Measure(
        REQUESTS,
        "Cost per 1M Tokens USD",
        "Cost",
        "DIVIDE([Active Cost USD], [Output Tokens]) * 1000000",
        "SELECT sum(cost_nano_usd) / 1e3 / nullif(sum(num_output_tokens), 0) FROM fact_request",
        DOLLARS,
        "Active cost per million output tokens",
    ),
    Measure(
        CAPACITY,
        "Full Cost per 1M Tokens USD",
        "Cost",
        "DIVIDE([Total Cost USD], [Output Tokens]) * 1000000",
        f"SELECT ({_TOTAL_COST_SQL}) * 1e6 / nullif((SELECT sum(num_output_tokens) "
        "FROM fact_request), 0)",
        DOLLARS,
        "Active, idle and lost cost per million output tokens",
    ),
    Measure(
        REQUESTS,
        "Estimated Cost without Speculation USD",
        "Cost",
        f"DIVIDE({sum_of('Estimated Cost Without Speculation Nano USD')}, 1000000000)",
        "SELECT sum(estimated_cost_without_speculation_nano_usd) / 1e9 FROM fact_request",
        DOLLARS,
        "An estimate from the cost table, of the requests that have one",
    ),
    Measure(
        REQUESTS,
        "Estimated Saving USD",
        "Cost",
        f"""SUMX(
    FILTER({REQUESTS}, NOT(ISBLANK({REQUESTS}[Estimated Cost Without Speculation Nano USD]))),
    {REQUESTS}[Estimated Cost Without Speculation Nano USD] - {REQUESTS}[Cost Nano USD]
) / 1000000000""",
        "SELECT sum(estimated_cost_without_speculation_nano_usd - cost_nano_usd) / 1e9 "
        "FROM fact_request",
        DOLLARS,
        "Estimated cost without speculation less active cost, of the same requests",
    ),
)


ENERGY = (
    Measure(
        REQUESTS,
        "Active Energy Wh",
        "Energy",
        f"DIVIDE({sum_of('Energy Microjoules')}, 3600000000)",
        "SELECT sum(energy_microjoules) / 3.6e9 FROM fact_request",
        DECIMAL,
        "Measured energy of the requests that have it",
    ),
    Measure(
        CAPACITY,
        "Idle Energy Wh",
        "Energy",
        f"DIVIDE(SUM({CAPACITY}[Energy Idle Microjoules]), 3600000000)",
        "SELECT sum(energy_idle_microjoules) / 3.6e9 FROM fact_capacity",
        DECIMAL,
        "Measured energy between steps",
    ),
    Measure(
        REQUESTS,
        "Energy per Token J",
        "Energy",
        f"""VAR Tokens =
    CALCULATE([Output Tokens], FILTER({REQUESTS}, NOT(ISBLANK({REQUESTS}[Energy Microjoules]))))
RETURN DIVIDE({sum_of("Energy Microjoules")}, Tokens) / 1000000""",
        "SELECT sum(energy_microjoules) / 1e6 / nullif(sum(num_output_tokens) "
        "FILTER (energy_microjoules IS NOT NULL), 0) FROM fact_request",
        "#,0.000",
        "Joules per output token of the requests whose energy was measured",
    ),
    Measure(
        REQUESTS,
        "Energy Coverage",
        "Energy",
        f"DIVIDE(COUNT({REQUESTS}[Energy Microjoules]), [Requests])",
        "SELECT count(energy_microjoules) / nullif(count(*), 0) FROM fact_request",
        PERCENT,
        "Share of requests whose energy was measured",
    ),
)


MACHINE = (
    Measure(
        CAPACITY,
        "Utilisation",
        "Capacity",
        f"DIVIDE(SUM({CAPACITY}[Busy Nanoseconds]), SUM({CAPACITY}[Wall Nanoseconds]))",
        "SELECT sum(busy_nanoseconds) / nullif(sum(wall_nanoseconds), 0) FROM fact_capacity",
        PERCENT,
        "Time inside steps over wall time",
    ),
    *(
        Measure(
            CAPACITY,
            f"{label} Hours",
            "Capacity",
            f"DIVIDE(SUM({CAPACITY}[{label} Nanoseconds]), 3600000000000)",
            f"SELECT sum({label.lower()}_nanoseconds) / 3.6e12 FROM fact_capacity",
            DECIMAL,
            description,
        )
        for label, description in (
            ("Busy", "Inside steps"),
            ("Idle", "Between steps"),
            ("Lost", "Not chargeable: the server was killed"),
        )
    ),
    Measure(
        CAPACITY,
        "Peak Running",
        "Capacity",
        f"MAX({CAPACITY}[Max Running])",
        "SELECT max(max_num_running) FROM fact_capacity",
        NUMBER,
        "Most requests running at once",
    ),
    Measure(
        CAPACITY,
        "Peak Waiting",
        "Capacity",
        f"MAX({CAPACITY}[Max Waiting])",
        "SELECT max(max_num_waiting) FROM fact_capacity",
        NUMBER,
        "Most requests waiting at once",
    ),
)
