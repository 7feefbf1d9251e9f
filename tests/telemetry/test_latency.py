"""The latencies of a request, and that each is None exactly when it never happened."""

import pytest

from telemetry.latency import summarise_latency
from tests.telemetry.step_stats import request_stats


def test_each_latency_is_what_its_name_says() -> None:
    """Waited 0.1 s, first token after 0.5 s, 10 further tokens in 5 further steps over 0.5 s."""
    latency = summarise_latency(request_stats(at=100.0))
    assert latency.queue_seconds == pytest.approx(0.1)
    assert latency.ttft_seconds == pytest.approx(0.5)
    assert latency.tpot_seconds == pytest.approx(0.05)
    assert latency.mean_step_latency_seconds == pytest.approx(0.1)
    assert latency.e2e_seconds == pytest.approx(1.0)


def test_what_never_happened_is_none() -> None:
    never_ran = summarise_latency(
        request_stats(
            first_scheduled_at=None,
            first_token_at=None,
            last_token_at=None,
            num_output_tokens=0,
            num_plain_steps=0,
            num_verify_steps=0,
        )
    )
    assert never_ran.queue_seconds is None
    assert never_ran.ttft_seconds is None
    assert never_ran.tpot_seconds is None
    assert never_ran.mean_step_latency_seconds is None
    assert never_ran.e2e_seconds == pytest.approx(1.0)


def test_one_token_has_no_time_between_tokens() -> None:
    single = request_stats(num_output_tokens=1, num_plain_steps=1, num_verify_steps=0)
    assert summarise_latency(single).tpot_seconds is None
    assert summarise_latency(single).mean_step_latency_seconds is None


def test_one_step_with_many_tokens_has_a_time_per_token_and_no_gap() -> None:
    burst = request_stats(num_output_tokens=5, num_plain_steps=0, num_verify_steps=1)
    assert summarise_latency(burst).tpot_seconds == pytest.approx(0.125)
    assert summarise_latency(burst).mean_step_latency_seconds is None
