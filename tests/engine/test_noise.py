"""The noise is uniform, independent in every part of its key, and depends on nothing else."""

import math

import pytest
import torch

from engine.noise import Stream, gumbel_noise, noise_key, uniform_noise
from tests.engine.sampling_reference import chi_square_p_value

NUM = 16_384
TOKENS = torch.arange(NUM)
SEEDS = [0, 1, 2, 12345, 2**31, 2**32 + 1, 2**63 - 1]


def over_tokens(seed: int, position: int, stream: Stream = Stream.TARGET) -> torch.Tensor:
    return uniform_noise([noise_key(seed, position, stream)], TOKENS)[0]


def over_positions(seed: int, token_id: int, start: int = 0) -> torch.Tensor:
    keys = [noise_key(seed, start + n, Stream.TARGET) for n in range(NUM)]
    return uniform_noise(keys, torch.tensor([token_id]))[:, 0]


def over_seeds(position: int, token_id: int, start: int = 0) -> torch.Tensor:
    keys = [noise_key(start + n, position, Stream.TARGET) for n in range(NUM)]
    return uniform_noise(keys, torch.tensor([token_id]))[:, 0]


def cells(uniform: torch.Tensor, num_cells: int) -> torch.Tensor:
    return (uniform * num_cells).long().clamp(max=num_cells - 1)


def uniformity(uniform: torch.Tensor, num_cells: int = 64) -> float:
    counts = torch.bincount(cells(uniform, num_cells), minlength=num_cells)
    return chi_square_p_value(counts, torch.ones(num_cells))


def independence(one: torch.Tensor, other: torch.Tensor, num_cells: int = 12) -> float:
    """Of pairs, by the counts of a square grid."""
    pairs = cells(one, num_cells) * num_cells + cells(other, num_cells)
    return chi_square_p_value(
        torch.bincount(pairs, minlength=num_cells**2), torch.ones(num_cells**2)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_it_is_uniform_over_tokens_and_over_positions(seed: int) -> None:
    assert uniformity(over_tokens(seed, 0)) > 1e-4
    assert uniformity(over_tokens(seed, 4095)) > 1e-4
    assert uniformity(over_positions(seed, 0)) > 1e-4
    assert uniformity(over_positions(seed, 49_151)) > 1e-4


@pytest.mark.parametrize("token_id", [0, 1, 49_151, 262_143])
def test_it_is_uniform_over_consecutive_seeds(token_id: int) -> None:
    assert uniformity(over_seeds(0, token_id)) > 1e-4
    assert uniformity(over_seeds(17, token_id)) > 1e-4


@pytest.mark.parametrize("seed", SEEDS[:-1])
def test_neighbours_in_any_part_of_the_key_are_independent(seed: int) -> None:
    base = over_tokens(seed, 7)
    assert independence(base, over_tokens(seed, 8)) > 1e-4
    assert independence(base, over_tokens(seed + 1, 7)) > 1e-4
    assert independence(base, over_tokens(seed + 1, 6)) > 1e-4
    assert independence(base, base.roll(1)) > 1e-4
    for stream in (Stream.ACCEPT, Stream.RECOVER, Stream.DRAFT):
        assert independence(base, over_tokens(seed, 7, stream)) > 1e-4
    positions = over_positions(seed, 3)
    assert independence(positions, over_positions(seed, 4)) > 1e-4
    assert independence(positions, positions.roll(1)) > 1e-4
    assert independence(over_seeds(0, 3, start=seed), over_seeds(1, 3, start=seed)) > 1e-4


def test_the_checks_of_uniformity_and_independence_can_fail() -> None:
    base = over_tokens(1, 7)
    assert uniformity(base**1.1) < 1e-4
    assert independence(base, base) < 1e-4
    assert independence(base, (base + over_tokens(2, 7) * 0.5) % 1) < 1e-4


def test_no_two_keys_of_nearby_requests_are_the_same() -> None:
    keys = {
        noise_key(seed, position, stream)
        for seed in range(60)
        for position in range(60)
        for stream in Stream
    }
    assert len(keys) == 60 * 60 * len(Stream)


def test_it_does_not_depend_on_the_batch_its_order_or_the_other_tokens() -> None:
    keys = [noise_key(seed, seed * 3, Stream.TARGET) for seed in range(9)]
    together = gumbel_noise(keys, TOKENS)
    backwards = gumbel_noise(keys[::-1], TOKENS)
    assert torch.equal(together.flip(0), backwards)
    some = torch.tensor([16_000, 3, 77])
    assert torch.equal(gumbel_noise(keys[4:5], some), together[4:5, some])


def test_the_same_key_gives_the_same_numbers_in_every_version() -> None:
    """Logged seeds must repeat later: these numbers may never change."""
    keys = [noise_key(42, 7, Stream.TARGET), noise_key(42, 7, Stream.DRAFT)]
    found = uniform_noise(keys, torch.tensor([0, 1, 49_151])).double()
    assert found.tolist() == [
        [0.09997828304767609, 0.32174402475357056, 0.4228033125400543],
        [0.02261575311422348, 0.25637903809547424, 0.17457996308803558],
    ]


LOWEST_KEY = 0  # the finaliser maps zero to zero, the lowest number there is
HIGHEST_KEY = 0x331DA083 << 32  # and this to 32 ones, which float32 would round to 1


def test_it_lies_strictly_between_zero_and_one_at_either_end() -> None:
    ends = uniform_noise([LOWEST_KEY, HIGHEST_KEY], torch.tensor([0])).flatten().tolist()
    assert 0 < ends[0] < 1e-9
    assert 1 - 1e-6 < ends[1] < 1
    assert gumbel_noise([LOWEST_KEY, HIGHEST_KEY], torch.tensor([0])).isfinite().all()


def test_gumbel_noise_has_the_moments_of_its_law() -> None:
    noise = gumbel_noise(
        [noise_key(seed, 1, Stream.TARGET) for seed in range(64)], torch.arange(65_536)
    ).double()
    assert float(noise.mean()) == pytest.approx(0.577216, abs=0.003)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.01)


def test_the_upper_tail_of_gumbel_noise_keeps_the_precision_of_small_numbers() -> None:
    keys = [noise_key(seed, 1, Stream.TARGET) for seed in range(64)]
    exact = -torch.log(-torch.log1p(-uniform_noise(keys, TOKENS).double()))
    assert float((gumbel_noise(keys, TOKENS).double() - exact).abs().max()) < 1e-5


def test_the_best_of_equal_logits_is_any_token_alike() -> None:
    keys = [noise_key(9, position, Stream.TARGET) for position in range(20_000)]
    best = gumbel_noise(keys, torch.arange(50)).argmax(dim=1)
    assert chi_square_p_value(torch.bincount(best, minlength=50), torch.ones(50)) > 1e-4
