"""Measures of volume and speculation."""

from exports.powerbi.measure import (
    ACCEPTANCE,
    DECIMAL,
    NUMBER,
    PERCENT,
    REQUESTS,
    Measure,
    sum_of,
)


def _count(name: str, folder: str, column: str, source: str, description: str) -> Measure:
    return Measure(
        REQUESTS,
        name,
        folder,
        sum_of(column),
        f"SELECT coalesce(sum({source}), 0) FROM fact_request",
        NUMBER,
        description,
    )


VOLUME = (
    Measure(
        REQUESTS,
        "Requests",
        "Volume",
        f"COUNTROWS({REQUESTS})",
        "SELECT count(*) FROM fact_request",
        NUMBER,
        "Attempts of requests, whatever their outcome",
    ),
    _count("Output Tokens", "Volume", "Output Tokens Count", "num_output_tokens", "Emitted"),
    _count("Prompt Tokens", "Volume", "Prompt Tokens Count", "num_prompt_tokens", "Cached too"),
    Measure(
        REQUESTS,
        "Success Rate",
        "Volume",
        "DIVIDE(CALCULATE([Requests], KEEPFILTERS(Outcome[Is Success] = TRUE())), [Requests])",
        "SELECT avg(o.is_success::INT) FROM fact_request JOIN dim_outcome o USING (outcome_key)",
        PERCENT,
        "Share of requests whose caller got what was asked for",
    ),
    Measure(
        REQUESTS,
        "Refused Requests",
        "Volume",
        'COALESCE(CALCULATE([Requests], KEEPFILTERS(Outcome[Outcome] = "refused")), 0)',
        "SELECT count(*) FROM fact_request JOIN dim_outcome o USING (outcome_key) "
        "WHERE o.outcome = 'refused'",
        NUMBER,
        "Requests that never reached the engine",
    ),
)


SPECULATION = (
    _count("Draft Tokens", "Speculation", "Draft Tokens Count", "num_draft_tokens", "Verified"),
    _count(
        "Accepted Tokens",
        "Speculation",
        "Accepted Tokens Count",
        "num_accepted_tokens",
        "Draft tokens accepted",
    ),
    Measure(
        REQUESTS,
        "Acceptance Rate",
        "Speculation",
        "DIVIDE([Accepted Tokens], [Draft Tokens])",
        "SELECT sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0) FROM fact_request",
        PERCENT,
        "Accepted over drafted tokens",
    ),
    Measure(
        REQUESTS,
        "Acceptance Length",
        "Speculation",
        f"VAR Rounds = {sum_of('Verify Steps Count')}\n"
        "RETURN IF(Rounds > 0, 1 + DIVIDE([Accepted Tokens], Rounds))",
        "SELECT 1 + sum(num_accepted_tokens) / nullif(sum(num_verify_steps), 0) FROM fact_request",
        DECIMAL,
        "Tokens per verification, the bonus token included (tau)",
    ),
    Measure(
        REQUESTS,
        "Tokens per Step",
        "Speculation",
        f"DIVIDE([Output Tokens], {sum_of('Steps Count')})",
        "SELECT sum(num_output_tokens) / nullif(sum(num_steps), 0) FROM fact_request",
        DECIMAL,
        "Emitted tokens per engine step that a request took part in",
    ),
    Measure(
        ACCEPTANCE,
        "Acceptance Rate at Position",
        "Speculation",
        f"DIVIDE(SUM({ACCEPTANCE}[Accepted Tokens Count]), SUM({ACCEPTANCE}[Draft Tokens Count]))",
        "SELECT sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0) FROM fact_acceptance",
        PERCENT,
        "Accepted over drafted tokens by place in the draft: use it with Position",
    ),
    Measure(
        ACCEPTANCE,
        "Verifications by Accepted Length",
        "Speculation",
        f"SUM({ACCEPTANCE}[Steps Accepted])",
        "SELECT coalesce(sum(num_steps_accepted), 0) FROM fact_acceptance",
        NUMBER,
        "Verifications that accepted exactly so many tokens: use it with Position",
    ),
    Measure(
        ACCEPTANCE,
        "Verifications by Draft Length",
        "Speculation",
        f"SUM({ACCEPTANCE}[Steps Drafted])",
        "SELECT coalesce(sum(num_steps_drafted), 0) FROM fact_acceptance",
        NUMBER,
        "Verifications that drafted exactly so many tokens: use it with Position",
    ),
    Measure(
        ACCEPTANCE,
        "Acceptance Length by Draft Length",
        "Speculation",
        f"VAR Counted = FILTER({ACCEPTANCE}, NOT(ISBLANK({ACCEPTANCE}[Accepted Of Length])))\n"
        f"VAR Rounds = CALCULATE([Verifications by Draft Length], Counted)\n"
        f"RETURN IF(Rounds > 0, 1 + DIVIDE(SUM({ACCEPTANCE}[Accepted Of Length]), Rounds))",
        "SELECT 1 + sum(num_accepted_of_length) / nullif(sum(num_steps_drafted), 0) "
        "FROM fact_acceptance WHERE num_accepted_of_length IS NOT NULL",
        DECIMAL,
        "Tokens per verification that drafted exactly so many tokens: use it with Position",
    ),
    Measure(
        REQUESTS,
        "Acceptance Length vs Default",
        "Speculation",
        "VAR Base = CALCULATE([Acceptance Length], 'Variant'[Variant] = \"default\")\n"
        "RETURN IF(NOT(ISBLANK(Base)), DIVIDE([Acceptance Length] - Base, Base))",
        "SELECT (a.v - b.v) / b.v FROM "
        "(SELECT 1 + sum(num_accepted_tokens) / nullif(sum(num_verify_steps), 0) AS v "
        "FROM fact_request) a, "
        "(SELECT 1 + sum(num_accepted_tokens) / nullif(sum(num_verify_steps), 0) AS v "
        "FROM fact_request JOIN dim_variant d USING (variant_key) "
        "WHERE d.variant = 'default') b",
        "+0.0%;-0.0%;0.0%",
        "Against the variant default in the same selection",
    ),
)
