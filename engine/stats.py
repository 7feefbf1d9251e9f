"""What happened in a step and in a request: additive counters and instants, never ratios.

Ratios are computed where they are read:
  acceptance rate    = num_accepted_tokens / num_draft_tokens
  acceptance length  = 1 + num_accepted_tokens / num_verify_steps   (tau; bonus included)
Instants (`..._at`) are `time.monotonic()` seconds; durations of steps are integer
nanoseconds because cost is split by them without loss.
"""

from dataclasses import dataclass
from enum import StrEnum

from engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class RowStepStats:
    """One request's share of one step. Positions are token positions that the target computed."""

    request_id: str
    num_prefill_positions: int  # prompt (or recomputed) tokens
    num_decode_positions: int  # the newest token of a decoding row: 0 or 1
    num_draft_positions: int  # drafted tokens that were verified
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_drafter_positions: int  # token positions that a draft model computed for this row

    @property
    def num_positions(self) -> int:
        """Target positions: what a step's time is split by."""
        return self.num_prefill_positions + self.num_decode_positions + self.num_draft_positions


class DrafterEventKind(StrEnum):
    FAILED = "failed"  # it raised or its values were not finite; it is left out for a while
    RECOVERED = "recovered"  # the first proposals after a failure
    FELL_SHORT = "fell_short"  # a request goes on with the next drafter of the list


@dataclass(frozen=True, slots=True)
class DrafterEvent:
    """What changed in who drafts. request_id is empty where it concerns all requests."""

    drafter: str
    kind: DrafterEventKind
    request_id: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step. Rows are those that computed at least one position.

    num_preemptions and num_audits_dropped (see EngineLoad) count since the engine's start; all
    other numbers are of this step.
    """

    step_index: int
    started_at: float
    duration_nanoseconds: int
    propose_nanoseconds: int
    verify_nanoseconds: int
    align_nanoseconds: int
    sample_nanoseconds: int
    rows: tuple[RowStepStats, ...]
    num_waiting: int
    num_running: int
    num_free_blocks: int
    num_total_blocks: int
    num_preemptions: int
    num_audits_dropped: int = 0
    drafter_events: tuple[DrafterEvent, ...] = ()
    preempted_request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """A finished request, whatever its outcome. The source of its ledger row.

    first_scheduled_at, first_token_at and last_token_at are None when that never happened.
    drafted_per_position[i] counts drafts that had a token at position i (0-based), and
    accepted_per_position[i] those accepted there. accepted_per_length[i] counts the tokens
    accepted out of drafts of exactly i + 1 tokens, and there were drafted_per_position[i] -
    drafted_per_position[i + 1] of these. All three have the same length.
    acceptance_histogram[n] counts verify steps that accepted exactly n drafted tokens.
    Identity: num_output_tokens = num_plain_steps + num_verify_steps + num_emitted_accepted_tokens
    - num_cut_tokens, where num_cut_tokens counts recovered or bonus tokens that a stop cut.
    """

    request_id: str
    finish_reason: FinishReason
    arrived_at: float
    first_scheduled_at: float | None
    first_token_at: float | None
    last_token_at: float | None
    finished_at: float
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_recomputed_tokens: int
    num_output_tokens: int
    num_prefill_positions: int
    num_steps: int
    num_plain_steps: int  # steps that emitted a token without verifying drafts
    num_verify_steps: int  # steps that verified at least one drafted token
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_accepted_tokens: int
    num_cut_tokens: int
    num_drafter_positions: int
    num_preemptions: int
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    accepted_per_length: tuple[int, ...]
    acceptance_histogram: tuple[int, ...]
    drafter: str  # the name of the drafter that proposed last; "" when none ever did
    seed: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A momentary reading for routers and health.

    num_audits_dropped counts, since the engine's start, the finished requests that were chosen for
    an audit and gave way to later ones, because no idle time came.
    """

    num_waiting: int
    num_running: int
    num_rows: int
    num_free_blocks: int
    num_total_blocks: int
    num_steps: int
    last_step_at: float | None
    num_audits_waiting: int = 0
    num_audits_dropped: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded; fixed for the life of an engine."""

    name: str
    fingerprint: str  # hash of the configuration and the weights' headers
    dtype: str
    device: str
    num_parameters: int
    vocab_size: int
    max_model_tokens: int
    numerics: str  # "invariant" or "fast": what was configured
    guarantee: str  # "bit_exact" or "rounding": what the probe measured
    layout: str
    drafters: tuple[str, ...]
    eos_token_ids: tuple[int, ...]
    quantization: str = "none"  # or "int8", of the weights
    plain_step_seconds: tuple[tuple[int, float], ...] = ()  # by rows, as measured at the start
