"""The bounds of the queue and of quotas, in requests and in tokens, with a clock of the test."""

import pytest

from service.admission import (
    UNLIMITED,
    Admission,
    AdmissionLimits,
    DeadlineRefusedError,
    RefusedError,
    TenantQuota,
)


def test_the_queue_is_bounded_in_tokens_as_well_as_in_requests() -> None:
    admission = Admission(AdmissionLimits(1, max_waiting_requests=2, max_waiting_tokens=200))
    admission.admit("a", UNLIMITED, 1, 100, 0.0, None)  # has a row
    waiting = admission.admit("a", UNLIMITED, 1, 100, 0.0, None)
    with pytest.raises(RefusedError, match="200 tokens is full") as too_long:
        admission.admit("b", UNLIMITED, 1, 1000, 0.0, None)
    assert too_long.value.subject == "server"
    admission.admit("b", UNLIMITED, 1, 100, 0.0, None)
    with pytest.raises(RefusedError, match="2 requests is full"):
        admission.admit("b", UNLIMITED, 1, 1, 0.0, None)
    assert (admission.num_live, admission.num_live_tokens) == (3, 300)  # refusals take nothing
    admission.release(waiting, 100, 1.0, UNLIMITED)
    admission.admit("b", UNLIMITED, 1, 1, 1.0, None)


def test_a_full_queue_says_to_come_back_after_the_wait_that_it_expects() -> None:
    admission = Admission(AdmissionLimits(1, max_waiting_requests=1, max_waiting_tokens=1000))
    admission.admit("a", UNLIMITED, 1, 100, 0.0, None)
    admission.admit("a", UNLIMITED, 1, 100, 0.0, None)
    admission.observe(50, 1.0)  # tokens, seconds: 2 requests of 100 tokens take 4 s
    assert admission.estimated_wait_seconds() == pytest.approx(4.0)
    with pytest.raises(RefusedError) as full:
        admission.admit("a", UNLIMITED, 1, 100, 0.0, None)
    assert full.value.retry_after_seconds == pytest.approx(4.0)


def test_a_deadline_is_refused_only_where_the_wait_is_longer() -> None:
    admission = Admission(AdmissionLimits(1, max_waiting_requests=9, max_waiting_tokens=9000))
    admission.admit("a", UNLIMITED, 1, 100, 0.0, 0.001)  # a row is free: no wait
    admission.observe(50, 1.0)
    with pytest.raises(DeadlineRefusedError):
        admission.admit("a", UNLIMITED, 1, 100, 0.0, 1.9)
    admission.admit("a", UNLIMITED, 1, 100, 0.0, 2.1)


def test_a_tenants_bucket_fills_with_time_up_to_its_burst_and_says_when_it_is_full_enough() -> None:
    admission = Admission(AdmissionLimits(9, max_waiting_requests=0, max_waiting_tokens=0))
    quota = TenantQuota(tokens_per_second=10.0, burst_tokens=100)
    used = admission.admit("a", quota, 1, 100, 0.0, None)
    admission.release(used, 100, 0.0, quota)
    with pytest.raises(RefusedError) as empty:
        admission.admit("a", quota, 1, 60, 1.0, None)
    assert (empty.value.subject, empty.value.retry_after_seconds) == ("tenant", 5.0)
    admission.admit("b", quota, 1, 60, 1.0, None)  # another tenant has a bucket of its own
    admission.admit("a", quota, 1, 60, 6.0, None)
    with pytest.raises(RefusedError):
        admission.admit("a", quota, 1, 101, 1000.0, None)  # never more than the burst
