"""Every name and unit that leaves the process as telemetry: the one place to look.

OpenTelemetry's GenAI and RPC names where they exist, `tandem.*` for speculation, cost, energy
and the ledger. Attribute values come from small fixed sets; request ids, trace ids, tenants and
labels never become attributes of a metric.
"""

from dataclasses import dataclass
from enum import StrEnum

from telemetry.buckets import (
    CALL_BUCKETS,
    DURATION_BUCKETS,
    TOKENS_PER_STEP_BUCKETS,
    TPOT_BUCKETS,
    TTFT_BUCKETS,
)

SCOPE = "tandem"
PROVIDER = "tandem"
OPERATION_GENERATE = "text_completion"
BAGGAGE_LABEL_PREFIX = "tandem.label."

ATTR_ERROR_TYPE = "error.type"
ATTR_RPC_SYSTEM = "rpc.system.name"
ATTR_RPC_METHOD = "rpc.method"
ATTR_RPC_STATUS_CODE = "rpc.response.status_code"
ATTR_GEN_AI_OPERATION = "gen_ai.operation.name"
ATTR_GEN_AI_PROVIDER = "gen_ai.provider.name"
ATTR_GEN_AI_REQUEST_MODEL = "gen_ai.request.model"
ATTR_GEN_AI_REQUEST_SEED = "gen_ai.request.seed"
ATTR_GEN_AI_REQUEST_STREAM = "gen_ai.request.stream"
ATTR_GEN_AI_REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
ATTR_GEN_AI_REQUEST_TEMPERATURE = "gen_ai.request.temperature"
ATTR_GEN_AI_REQUEST_TOP_P = "gen_ai.request.top_p"
ATTR_GEN_AI_REQUEST_TOP_K = "gen_ai.request.top_k"
ATTR_GEN_AI_RESPONSE_ID = "gen_ai.response.id"
ATTR_GEN_AI_RESPONSE_MODEL = "gen_ai.response.model"
ATTR_GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
ATTR_GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTR_GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTR_GEN_AI_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ATTR_GEN_AI_TOKEN_TYPE = "gen_ai.token.type"

ATTR_DRAFTER = "tandem.speculation.drafter"
ATTR_VARIANT = "tandem.variant"
ATTR_DRAFTER_EVENT = "tandem.speculation.drafter_event"
ATTR_DECISION = "tandem.speculation.decision"
ATTR_BREAKER_STATE = "tandem.speculation.breaker_state"
ATTR_POSITION = "tandem.speculation.position"
ATTR_DRAFT_TOKENS = "tandem.speculation.draft_tokens"
ATTR_ACCEPTED_TOKENS = "tandem.speculation.accepted_tokens"
ATTR_VERIFY_STEPS = "tandem.speculation.verify_steps"
ATTR_COST_NANO_USD = "tandem.cost.nano_usd"
ATTR_ENERGY_MICROJOULES = "tandem.energy.microjoules"
ATTR_ENERGY_SOURCE = "tandem.energy.source"
ATTR_OUTCOME = "tandem.outcome"
ATTR_REASON = "tandem.reason"
ATTR_PART = "tandem.cost.part"
ATTR_PHASE = "tandem.step.phase"
ATTR_VERDICT = "tandem.audit.verdict"
ATTR_KIND = "tandem.ledger.record_kind"
ATTR_STATE = "tandem.state"
ATTR_CACHE_RESULT = "tandem.prefix_cache.result"
ATTR_CAPTURE_RESULT = "tandem.capture.result"
ATTR_STEP_INDEX = "tandem.step.index"
ATTR_STEP_ROWS = "tandem.step.rows"
ATTR_STEP_PREFILL_POSITIONS = "tandem.step.prefill_positions"
ATTR_STEP_DRAFT_POSITIONS = "tandem.step.draft_positions"
ATTR_STEP_ACCEPTED_TOKENS = "tandem.step.accepted_tokens"

SPAN_QUEUE = "queue"
SPAN_PREFILL = "prefill"
SPAN_DECODE = "decode"
SPAN_ENGINE_STEP = "engine.step"
EVENT_FIRST_TOKEN = "first_token"
EVENT_PREEMPTED = "preempted"
EVENT_FALL_BACK = "fall_back"
EVENT_BREAKER = "breaker"


class Instrument(StrEnum):
    """The kinds of OpenTelemetry instruments in use."""

    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `attributes` are all that it may carry; `max_series` bounds their product, below
    the 2000 beyond which OpenTelemetry itself throws series together."""

    name: str
    instrument: Instrument
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    max_series: int = 64


_BY_DRAFTER = (ATTR_DRAFTER, ATTR_VARIANT)

TTFT = MetricSpec(
    "gen_ai.server.time_to_first_token", Instrument.HISTOGRAM, "s",
    "Arrival to the first token.", (ATTR_VARIANT,), TTFT_BUCKETS,
)  # fmt: skip
TPOT = MetricSpec(
    "gen_ai.server.time_per_output_token", Instrument.HISTOGRAM, "s",
    "Mean time between the tokens after the first, per request.", (ATTR_VARIANT,), TPOT_BUCKETS,
)  # fmt: skip
REQUEST_DURATION = MetricSpec(
    "gen_ai.server.request.duration", Instrument.HISTOGRAM, "s",
    "Arrival to the end of a request.", (ATTR_VARIANT, ATTR_OUTCOME), DURATION_BUCKETS, 256,
)  # fmt: skip
CALL_DURATION = MetricSpec(
    "rpc.server.call.duration", Instrument.HISTOGRAM, "s",
    "Duration of a gRPC call.", (ATTR_RPC_METHOD, ATTR_RPC_STATUS_CODE), CALL_BUCKETS, 256,
)  # fmt: skip
QUEUE_TIME = MetricSpec(
    "tandem.request.queue_time", Instrument.HISTOGRAM, "s",
    "Arrival to the first step that computed the request.", (ATTR_VARIANT,), TTFT_BUCKETS,
)  # fmt: skip
STEP_LATENCY = MetricSpec(
    "tandem.request.step_latency", Instrument.HISTOGRAM, "s",
    "Mean gap between the messages of a stream, which may hold several tokens each.",
    (ATTR_VARIANT,), TPOT_BUCKETS,
)  # fmt: skip
TOKENS_PER_STEP = MetricSpec(
    "tandem.request.tokens_per_step", Instrument.HISTOGRAM, "{token}",
    "Tokens that a decoding row got from one step; a few rows of each step.", (),
    TOKENS_PER_STEP_BUCKETS,
)  # fmt: skip
STEP_DURATION = MetricSpec(
    "tandem.step.duration", Instrument.HISTOGRAM, "s",
    "Wall time of one engine step.", (), TPOT_BUCKETS,
)  # fmt: skip
STEP_PHASE_TIME = MetricSpec(
    "tandem.step.phase_time", Instrument.COUNTER, "s",
    "Time in the phases of steps: propose, verify, align, sample.", (ATTR_PHASE,),
)  # fmt: skip
TOKENS = MetricSpec(
    "tandem.tokens", Instrument.COUNTER, "{token}",
    "Tokens of finished requests: input, cached_input, output, recomputed.",
    (ATTR_GEN_AI_TOKEN_TYPE, ATTR_VARIANT),
)  # fmt: skip
REQUESTS = MetricSpec(
    "tandem.requests", Instrument.COUNTER, "{request}",
    "Finished requests by outcome.", (ATTR_OUTCOME, ATTR_VARIANT), (), 256,
)  # fmt: skip
REJECTS = MetricSpec(
    "tandem.requests.refused", Instrument.COUNTER, "{request}",
    "Requests that never reached the engine, by reason.", (ATTR_REASON,),
)  # fmt: skip
DRAFTS = MetricSpec(
    "tandem.speculation.drafts", Instrument.COUNTER, "{draft}",
    "Verify steps of finished requests.", _BY_DRAFTER, (), 256,
)  # fmt: skip
DRAFTED = MetricSpec(
    "tandem.speculation.draft_tokens", Instrument.COUNTER, "{token}",
    "Drafted tokens that were verified.", _BY_DRAFTER, (), 256,
)  # fmt: skip
ACCEPTED = MetricSpec(
    "tandem.speculation.accepted_tokens", Instrument.COUNTER, "{token}",
    "Drafted tokens that the target accepted.", _BY_DRAFTER, (), 256,
)  # fmt: skip
EMITTED_ACCEPTED = MetricSpec(
    "tandem.speculation.emitted_accepted_tokens", Instrument.COUNTER, "{token}",
    "Accepted tokens that reached the output.", _BY_DRAFTER, (), 256,
)  # fmt: skip
DRAFTED_BY_POSITION = MetricSpec(
    "tandem.speculation.draft_tokens_by_position", Instrument.COUNTER, "{token}",
    "Drafted tokens by position in the draft.", (ATTR_POSITION, *_BY_DRAFTER), (), 1024,
)  # fmt: skip
ACCEPTED_BY_POSITION = MetricSpec(
    "tandem.speculation.accepted_tokens_by_position", Instrument.COUNTER, "{token}",
    "Accepted tokens by position in the draft.", (ATTR_POSITION, *_BY_DRAFTER), (), 1024,
)  # fmt: skip
DRAFT_LENGTH = MetricSpec(
    "tandem.speculation.draft_length", Instrument.HISTOGRAM, "{token}",
    "K: tokens drafted for a decoding row, 0 included; a few rows of each step.", (),
    (0.0, *TOKENS_PER_STEP_BUCKETS),
)  # fmt: skip
DECISIONS = MetricSpec(
    "tandem.speculation.decisions", Instrument.COUNTER, "{row}",
    "Decoding rows of all steps by what the controller chose: draft, plain.", (ATTR_DECISION,),
)  # fmt: skip
DRAFTER_EVENTS = MetricSpec(
    "tandem.speculation.drafter_events", Instrument.COUNTER, "{event}",
    "Drafters that failed, recovered, or fell short so that another one goes on.",
    (ATTR_DRAFTER, ATTR_DRAFTER_EVENT), (), 256,
)  # fmt: skip
BREAKER_CHANGES = MetricSpec(
    "tandem.speculation.breaker_changes", Instrument.COUNTER, "{change}",
    "Changes of the breaker that divergences trip, by the new state.", (ATTR_BREAKER_STATE,),
)  # fmt: skip
BREAKER_OPEN = MetricSpec(
    "tandem.speculation.breaker_open", Instrument.GAUGE, "1",
    "1 while the breaker keeps speculation off, else 0.",
)  # fmt: skip
ACCEPTANCE_DROP = MetricSpec(
    "tandem.speculation.acceptance_drop", Instrument.GAUGE, "1",
    "By how much a drafter's recent acceptance length is below its usual one.", (ATTR_DRAFTER,),
)  # fmt: skip
GOODPUT = MetricSpec(
    "tandem.goodput", Instrument.GAUGE, "{token}/s",
    "Emitted tokens per second of step time, over the last capacity interval.",
)  # fmt: skip
ROWS = MetricSpec(
    "tandem.rows", Instrument.GAUGE, "{row}", "Requests running in the last step.",
)  # fmt: skip
QUEUE_DEPTH = MetricSpec(
    "tandem.queue_depth", Instrument.GAUGE, "{request}", "Requests waiting for the engine.",
)  # fmt: skip
BLOCKS = MetricSpec(
    "tandem.cache.blocks", Instrument.GAUGE, "{block}",
    "Blocks of the key-value cache: free, used.", (ATTR_STATE,),
)  # fmt: skip
PREFIX_LOOKUPS = MetricSpec(
    "tandem.prefix_cache.lookups", Instrument.COUNTER, "{request}",
    "Finished requests by whether a part of their prompt was cached: hit, miss.",
    (ATTR_CACHE_RESULT,),
)  # fmt: skip
PREEMPTIONS = MetricSpec(
    "tandem.preemptions", Instrument.COUNTER, "{preemption}",
    "Rows that gave up their blocks and were computed again.",
)  # fmt: skip
AUDITS = MetricSpec(
    "tandem.audit.results", Instrument.COUNTER, "{request}",
    "Audited requests by verdict: exact, numeric_tie, divergence.", (ATTR_VERDICT,),
)  # fmt: skip
AUDITS_DROPPED = MetricSpec(
    "tandem.audit.dropped", Instrument.COUNTER, "{request}",
    "Requests chosen for an audit that gave way to later ones: no idle time came.",
)  # fmt: skip
ENERGY = MetricSpec(
    "tandem.energy", Instrument.COUNTER, "J",
    "Measured energy; nothing is counted while no source works.", (ATTR_ENERGY_SOURCE,),
)  # fmt: skip
ENERGY_SOURCE_UP = MetricSpec(
    "tandem.energy.source_up", Instrument.GAUGE, "1",
    "1 while the energy counter that was found at start answers, else 0.", (ATTR_ENERGY_SOURCE,),
)  # fmt: skip
COST = MetricSpec(
    "tandem.cost", Instrument.COUNTER, "USD",
    "Cost of the machine: prefill, decode, draft, drafter, idle.", (ATTR_PART,),
)  # fmt: skip
LEDGER_RECORDS = MetricSpec(
    "tandem.ledger.records", Instrument.COUNTER, "{record}",
    "Records that reached the database, by kind.", (ATTR_KIND,),
)  # fmt: skip
LEDGER_QUEUE = MetricSpec(
    "tandem.ledger.queue", Instrument.GAUGE, "{record}", "Records that wait for the writer.",
)  # fmt: skip
LEDGER_LAG = MetricSpec(
    "tandem.ledger.lag", Instrument.GAUGE, "s",
    "Age of the oldest record that is not in the database yet.",
)  # fmt: skip
LEDGER_SPILLED = MetricSpec(
    "tandem.ledger.spilled", Instrument.COUNTER, "{record}",
    "Records that went to the local journal because the database was away.",
)  # fmt: skip
LEDGER_JOURNAL_BYTES = MetricSpec(
    "tandem.ledger.journal_size", Instrument.GAUGE, "By", "Size of the local journal.",
)  # fmt: skip
LEDGER_LOST = MetricSpec(
    "tandem.ledger.lost", Instrument.COUNTER, "{record}",
    "Records that could be written nowhere: any is an incident.",
)  # fmt: skip
EXPORT_FAILURES = MetricSpec(
    "tandem.telemetry.export_failures", Instrument.COUNTER, "{export}",
    "Batches of spans or metrics that the collector did not take.", (ATTR_KIND,),
)  # fmt: skip
CAPTURED_PROMPTS = MetricSpec(
    "tandem.capture.prompts", Instrument.COUNTER, "{prompt}",
    "Prompts chosen to be kept for training: written, dropped, left_out, failed.",
    (ATTR_CAPTURE_RESULT,),
)  # fmt: skip

METRICS: tuple[MetricSpec, ...] = (
    TTFT, TPOT, REQUEST_DURATION, CALL_DURATION, QUEUE_TIME, STEP_LATENCY, TOKENS_PER_STEP,
    STEP_DURATION, STEP_PHASE_TIME, TOKENS, REQUESTS, REJECTS, DRAFTS, DRAFTED, ACCEPTED,
    EMITTED_ACCEPTED, DRAFTED_BY_POSITION, ACCEPTED_BY_POSITION, DRAFT_LENGTH, DECISIONS,
    DRAFTER_EVENTS, BREAKER_CHANGES, BREAKER_OPEN, ACCEPTANCE_DROP, GOODPUT, ROWS, QUEUE_DEPTH,
    BLOCKS, PREFIX_LOOKUPS, PREEMPTIONS, AUDITS, AUDITS_DROPPED, ENERGY, ENERGY_SOURCE_UP, COST,
    LEDGER_RECORDS, LEDGER_QUEUE, LEDGER_LAG, LEDGER_SPILLED, LEDGER_JOURNAL_BYTES, LEDGER_LOST,
    EXPORT_FAILURES, CAPTURED_PROMPTS,
)  # fmt: skip
