"""What the runner can promise about a model: measured at start, never assumed.

`check_agreement` compares our forward with the model's own, so a model whose attention we do
not reproduce is refused. `probe_guarantee` feeds the same tokens in different company and
asks whether every logit keeps its bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.layout.plan import ForwardRow
from engine.loader import UnsupportedModelError
from engine.model_runner import ModelRunner
from engine.suitability import sample_token_ids

# Long enough that some forwards read 128 keys and others 256 (Padding.keys).
_NUM_PROBE_TOKENS = 144
_NUM_COMPARED = 32
_WIDTHS = (1, 2, 5, 1, 3, 8, 4)  # of the chunks that end the probed row
_NEIGHBOUR_LENGTHS = (20, 88, 168)


@dataclass(frozen=True, slots=True)
class _Feed:
    """A row's tokens, how many of them each forward computes, and whose logits are kept."""

    token_ids: Sequence[int]
    widths: Sequence[int]
    is_probed: bool = False


def check_agreement(
    name: str, runner: ModelRunner, logits: torch.Tensor, token_ids: Sequence[int]
) -> None:
    """Raise UnsupportedModelError unless our forward, in two chunks, gives the model's own
    `logits` up to rounding."""
    half = len(token_ids) // 2
    ours = _run(runner, [_Feed(token_ids, [half, len(token_ids) - half], is_probed=True)])
    difference = (ours.float() - logits.float()).abs().max().item()
    spread = logits.float().std().item()
    tolerance = 0.25 if logits.dtype in (torch.bfloat16, torch.float16) else 2e-3
    if not difference <= tolerance * max(spread, 1e-6):
        raise UnsupportedModelError(
            f"{name}: our attention differs from its own by {difference:.3g} "
            f"(logits spread over {spread:.3g}); it uses a variant that is not supported"
        )


def probe_guarantee(runner: ModelRunner) -> str:
    """ "bit_exact" if the same tokens gave the same logits to the bit in every company tried:
    whole, in chunks of many widths, alone, among neighbours; else "rounding"."""
    vocab_size = runner.model.config.get_text_config().vocab_size
    num_tokens = min(_NUM_PROBE_TOKENS, runner.cache.max_tokens - 1)
    token_ids = sample_token_ids(vocab_size, num_tokens, seed=2)
    whole = _run(runner, [_Feed(token_ids, [num_tokens], is_probed=True)])
    widths = _widths(num_tokens)
    alone = _run(runner, [_Feed(token_ids, widths, is_probed=True)])
    if not torch.equal(whole, alone):
        return "rounding"
    lengths = [min(length, num_tokens) for length in _NEIGHBOUR_LENGTHS]
    neighbours = [
        _Feed(sample_token_ids(vocab_size, length, seed=3 + number), _spread(length, len(widths)))
        for number, length in enumerate(lengths[: runner.cache.num_free_rows - 1])
    ]
    # The probed row is neither first nor last, so that its place in the forward changes too.
    feeds = [*neighbours[:1], _Feed(token_ids, widths, is_probed=True), *neighbours[1:]]
    if neighbours and not torch.equal(whole, _run(runner, feeds)):
        return "rounding"
    return "bit_exact"


def _widths(num_tokens: int) -> list[int]:
    """Two chunks, then narrow ones: what a chunked prompt, plain steps and drafts look like."""
    narrow: list[int] = []
    for width in _WIDTHS:
        if sum(narrow) + width <= min(_NUM_COMPARED, num_tokens // 2):
            narrow.append(width)
    rest = num_tokens - sum(narrow)
    return [width for width in (rest // 2, rest - rest // 2, *narrow) if width]


def _spread(num_tokens: int, num_forwards: int) -> list[int]:
    """A neighbour's widths: half of its tokens at first, the others evenly."""
    first = num_tokens // 2
    rest, others = num_tokens - first, max(1, num_forwards - 1)
    return [first, *(rest * (n + 1) // others - rest * n // others for n in range(others))]


def _run(runner: ModelRunner, feeds: Sequence[_Feed]) -> torch.Tensor:
    """Logits [T, V] of the probed row, one forward per width."""
    cache = runner.cache
    rows = [cache.allocate_row(feed.token_ids[:1])[0] for feed in feeds]
    found: list[torch.Tensor] = []
    try:
        for row, feed in zip(rows, feeds, strict=True):
            cache.reserve(row, len(feed.token_ids))
        for step in range(max(len(feed.widths) for feed in feeds)):
            found.append(runner.forward(list(_rows_of_step(rows, feeds, step))))
    finally:
        for row in rows:
            cache.free_row(row, keep=False)
    return torch.cat(found)


def _rows_of_step(rows: Sequence[int], feeds: Sequence[_Feed], step: int) -> Iterable[ForwardRow]:
    for row, feed in zip(rows, feeds, strict=True):
        if step < len(feed.widths) and feed.widths[step]:
            start, width = sum(feed.widths[:step]), feed.widths[step]
            chunk = feed.token_ids[start : start + width]
            yield ForwardRow(row, chunk, start, width if feed.is_probed else 0)
