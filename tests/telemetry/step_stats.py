"""Engine statistics for tests, with the fields that matter and nothing in the others."""

from engine.request import FinishReason
from engine.stats import RequestStats, RowStepStats, StepStats


def row(
    request_id: str = "r", prefill: int = 0, decode: int = 1, draft: int = 0, accepted: int = 0
) -> RowStepStats:
    return RowStepStats(request_id, prefill, decode, draft, accepted, accepted + 1, draft)


def step(
    started_nanoseconds: int,
    duration_nanoseconds: int,
    *rows: RowStepStats,
    index: int = 0,
    propose_nanoseconds: int = 0,
) -> StepStats:
    return StepStats(
        step_index=index,
        started_at=started_nanoseconds / 1e9,
        duration_nanoseconds=duration_nanoseconds,
        propose_nanoseconds=propose_nanoseconds,
        verify_nanoseconds=duration_nanoseconds - propose_nanoseconds,
        align_nanoseconds=0,
        sample_nanoseconds=0,
        rows=rows,
        num_waiting=1,
        num_running=len(rows),
        num_free_blocks=6,
        num_total_blocks=10,
        num_preemptions=0,
    )


def request_stats(request_id: str = "r", at: float = 100.0, **changes: object) -> RequestStats:
    """A request that arrived at `at`, waited 0.1 s and took 1 s for 11 tokens in 6 steps."""
    values: dict[str, object] = {
        "request_id": request_id,
        "finish_reason": FinishReason.LENGTH,
        "arrived_at": at,
        "first_scheduled_at": at + 0.1,
        "first_token_at": at + 0.5,
        "last_token_at": at + 1.0,
        "finished_at": at + 1.0,
        "num_prompt_tokens": 7,
        "num_cached_prompt_tokens": 3,
        "num_recomputed_tokens": 0,
        "num_output_tokens": 11,
        "num_prefill_positions": 4,
        "num_steps": 7,
        "num_plain_steps": 1,
        "num_verify_steps": 5,
        "num_draft_tokens": 9,
        "num_accepted_tokens": 5,
        "num_emitted_accepted_tokens": 5,
        "num_cut_tokens": 0,
        "num_drafter_positions": 9,
        "num_preemptions": 0,
        "drafted_per_position": (5, 4),
        "accepted_per_position": (3, 2),
        "accepted_per_length": (1, 4),
        "acceptance_histogram": (2, 1, 2),
        "drafter": "prompt_lookup",
        "seed": 42,
    }
    return RequestStats(**{**values, **changes})  # type: ignore[arg-type]
