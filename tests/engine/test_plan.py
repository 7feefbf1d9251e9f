"""Sizes of a forward: few of them, and never much larger than what is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from engine.layout.plan import round_to_bucket


@given(st.integers(0, 5000), st.sampled_from([2, 4, 8]))
def test_a_bucket_holds_its_value_in_a_multiple_and_wastes_little(
    value: int, multiple: int
) -> None:
    size = round_to_bucket(value, multiple)
    assert size >= value
    assert size % multiple == 0
    assert size - value < max(multiple, value / 8 + 1)
    assert round_to_bucket(size, multiple) == size


def test_a_server_meets_few_sizes() -> None:
    assert len({round_to_bucket(n, 2) for n in range(1, 2049)}) <= 64
    assert round_to_bucket(37, 1) == 37, "without padding there are no buckets"
