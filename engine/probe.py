"""What the runner can promise about a model: measured at start, never assumed.

`check_agreement` compares our forward with the model's own, so a model whose attention we do
not reproduce is refused. `probe_guarantee` feeds the same tokens in different company and
asks whether every logit keeps its bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.agreement import disagreement
from engine.layout.plan import ForwardRow
from engine.loader import UnsupportedModelError
from engine.suitability import sample_token_ids
from engine.target_runner import TargetRunner

# Long enough that some forwards read 128 keys and others 256 (Padding.keys).
_NUM_PROBE_TOKENS = 136
_WIDTHS = (1, 2, 5, 1, 3, 8, 4)  # of the chunks that end the probed row; these are compared
# The last is ahead of the probed row at first: where rows are aligned, each pads the other.
_NEIGHBOUR_LENGTHS = (6, 24, _NUM_PROBE_TOKENS)
_NUM_SHARED = 8
_CROWD_LENGTH = 100  # of each neighbour whose whole prompt shares a forward with the probed row


@dataclass(frozen=True, slots=True)
class _Feed:
    """A row's tokens, how many of them each forward computes, and from where logits are kept."""

    token_ids: Sequence[int]
    widths: Sequence[int]
    first_logit: int


def check_agreement(
    name: str,
    runner: TargetRunner,
    logits: torch.Tensor,
    token_ids: Sequence[int],
    *,
    is_padded: bool = False,
) -> None:
    """Raise UnsupportedModelError unless our forward, in two chunks, gives the model's own
    `logits` up to rounding. is_padded asks it of a row that a longer neighbour pads, too."""
    half = len(token_ids) // 2
    checked = _Feed(token_ids, [half, len(token_ids) - half], 0)
    _compare(name, logits, _run(runner, [checked]))
    if is_padded:
        last = min(_NUM_SHARED, half)  # few enough that the two rows share the second forward
        longer = _Feed(token_ids, [len(token_ids) - 1, 1], len(token_ids))
        checked = _Feed(token_ids, [len(token_ids) - last, last], 0)
        _compare(name, logits, _run(runner, [longer, checked]))


def _compare(name: str, logits: torch.Tensor, ours: torch.Tensor) -> None:
    if not bool(torch.isfinite(logits).all()):
        raise UnsupportedModelError(
            f"{name}: its logits are not finite; its weights are damaged, or need another dtype"
        )
    error, tolerance = disagreement(logits, ours)
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{name}: our logits differ from its own by {error:.2g} of their spread, more than "
            f"{tolerance}; its attention is of a kind that is not supported"
        )


def probe_guarantee(runner: TargetRunner) -> str:
    """ "bit_exact" if the same tokens gave the same logits to the bit in every company tried:
    whole, in chunks of many widths, alone, among neighbours and their prompts; else
    "rounding"."""
    vocab_size = runner.model.config.get_text_config().vocab_size
    num_tokens = min(_NUM_PROBE_TOKENS, runner.cache.max_tokens - 1)
    token_ids = sample_token_ids(vocab_size, num_tokens, seed=2)
    widths = _widths(num_tokens)
    first = num_tokens - sum(widths[2:])
    whole = _run(runner, [_Feed(token_ids, [num_tokens], first)])
    probed = _Feed(token_ids, widths, first)
    if not torch.equal(whole, _run(runner, [probed])):
        return "rounding"
    lengths = [min(length, num_tokens) for length in _NEIGHBOUR_LENGTHS]
    neighbours = [
        _Feed(sample_token_ids(vocab_size, n, seed=3 + n), _spread(n, len(widths)), n)
        for n in lengths[: runner.cache.num_free_rows - 1]
    ]
    # The probed row is neither first nor last, so that its place in the forward changes too.
    if neighbours and not torch.equal(
        whole, _run(runner, [*neighbours[:1], probed, *neighbours[1:]])
    ):
        return "rounding"
    # Prompts share a forward, too: some kernels work otherwise on hundreds of tokens.
    crowd = [
        _Feed(sample_token_ids(vocab_size, n, seed=30 + place), [n], n)
        for place, n in enumerate([min(_CROWD_LENGTH, num_tokens)] * len(neighbours))
    ]
    at_once = _Feed(token_ids, [num_tokens], first)
    if crowd and not torch.equal(whole, _run(runner, [*crowd[:1], at_once, *crowd[1:]])):
        return "rounding"
    return "bit_exact"


def _widths(num_tokens: int) -> list[int]:
    """Two chunks, then narrow ones: what a chunked prompt, plain steps and drafts look like."""
    narrow: list[int] = []
    for width in _WIDTHS:
        if sum(narrow) + width <= num_tokens - 2:
            narrow.append(width)
    rest = num_tokens - sum(narrow)
    return [rest // 2, rest - rest // 2, *narrow]


def _spread(num_tokens: int, num_forwards: int) -> list[int]:
    """A neighbour's widths: half of its tokens at first, the others evenly."""
    first = num_tokens // 2
    rest, others = num_tokens - first, num_forwards - 1
    return [first, *(rest * (n + 1) // others - rest * n // others for n in range(others))]


def _run(runner: TargetRunner, feeds: Sequence[_Feed]) -> torch.Tensor:
    """Logits [T, V] of the feeds, in one forward per width."""
    cache = runner.cache
    rows = [cache.allocate_row(feed.token_ids[:1])[0] for feed in feeds]
    found: list[torch.Tensor] = []
    try:
        for row, feed in zip(rows, feeds, strict=True):
            cache.reserve(row, len(feed.token_ids))
        for step in range(max(len(feed.widths) for feed in feeds)):
            found.append(runner.forward(list(_rows_of_step(rows, feeds, step))))
            for row, feed in zip(rows, feeds, strict=True):
                cache.commit(row, feed.token_ids, sum(feed.widths[: step + 1]))
    finally:
        for row in rows:
            cache.free_row(row, keep=False)
    return torch.cat(found)


def _rows_of_step(rows: Sequence[int], feeds: Sequence[_Feed], step: int) -> Iterable[ForwardRow]:
    for row, feed in zip(rows, feeds, strict=True):
        if step < len(feed.widths) and feed.widths[step]:
            start = sum(feed.widths[:step])
            stop = start + feed.widths[step]
            num_logits = max(0, stop - max(start, feed.first_logit))
            yield ForwardRow(row, feed.token_ids[start:stop], start, num_logits)
