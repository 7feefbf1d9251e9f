"""Whether attention gives a token the same bits beside rows of any length: measured at start.

The probe of the whole model (engine/probe.py) is short, because a forward is dear; attention
alone is cheap, and it is all that looks at a context's length.
"""

from dataclasses import replace
from typing import Any

import torch

from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.plan import ForwardRow, Padding
from engine.layout.ragged import plan_forward
from engine.model_runner import ModelRunner
from engine.planned_attention import PlannedAttention

_ENDS = range(100, 1200, 128)  # of the probed tokens: one for every number of keys up to 1,152
_NUM_TOKENS = 16  # the most that rows of a shared call compute
_WIDE = 300  # more than that: a call of their own, in which the kernel takes more queries at a time
_SOFTCAP = 30.0
_NUM_DRAWS = 3  # in bfloat16 another order of adding shows in one value of some ten thousand


def attention_keeps_bits(runner: ModelRunner, block_size: int | None, max_tokens: int) -> bool:
    """For what the runner's model was seen to ask of its attention; see `keeps_bits`."""
    num_heads = runner.model.config.get_text_config().num_attention_heads
    sizes = (runner.cache.shape, num_heads, runner.padding, block_size, max_tokens)
    return keeps_bits(*sizes) and (not runner.attends_by_hand or keeps_bits(*sizes, by_hand=True))


@torch.inference_mode()
def keeps_bits(
    shape: KVCacheShape,
    num_heads: int,
    padding: Padding,
    block_size: int | None,
    max_tokens: int,
    *,
    by_hand: bool = False,
) -> bool:
    """Compares the same tokens alone, beside every longer row, and in a wide chunk, over a cache
    of one layer, as far as max_tokens allow. block_size None probes contiguous rows; by_hand
    probes what no fused kernel offers."""
    ends = [end for end in _ENDS if end <= max_tokens]
    if not ends:
        return True
    one_layer = replace(shape, num_layers=1, shards=None)
    for seed in range(_NUM_DRAWS):
        probe = _Probe(one_layer, num_heads, padding, block_size, ends[-1], seed, by_hand)
        if not all(probe.is_same(end, ends[place:]) for place, end in enumerate(ends)):
            return False
    return True


class _Probe:
    """Two rows with the same random keys and values, and a random query for every position."""

    def __init__(
        self,
        shape: KVCacheShape,
        num_heads: int,
        padding: Padding,
        block_size: int | None,
        num_tokens: int,
        seed: int,
        by_hand: bool,
    ) -> None:
        self._padding = padding
        self._cache = KVCache(
            shape,
            max_num_rows=2,
            max_tokens=num_tokens,
            num_blocks=2 * -(-num_tokens // block_size) if block_size else 2,
            block_size=block_size,
        )
        self._rows = [self._cache.allocate_row([0], f"bits {place}")[0] for place in range(2)]
        generator = torch.Generator().manual_seed(seed)

        def random(num_of_heads: int, size: int) -> torch.Tensor:
            values = torch.randn(num_tokens, num_of_heads, size, generator=generator)
            return values.to(shape.device, shape.dtype)

        self._asked: dict[str, Any] = {}
        if by_hand:
            self._asked = {
                "softcap": _SOFTCAP,
                "sinks": torch.zeros(num_heads, dtype=shape.dtype, device=shape.device),
            }
        self._queries = 2 * random(num_heads, shape.key_size)  # some keys stand out
        self._keys = random(shape.num_kv_heads, shape.key_size)
        self._values = random(shape.num_kv_heads, shape.value_size)
        for row in self._rows:
            self._cache.reserve(row, num_tokens)
            slots = torch.tensor(list(self._cache.slots(row, 0, num_tokens)), device=shape.device)
            self._cache.keys[0].index_copy_(0, slots, self._keys)
            self._cache.values[0].index_copy_(0, slots, self._values)

    def is_same(self, end: int, longer: list[int]) -> bool:
        """Whether the tokens before `end` get the same bits in all the companies."""
        first, second = self._rows
        alone = self._attend([(first, end, _NUM_TOKENS)])
        wide = self._attend([(first, end, min(end, _WIDE))])
        others = (self._attend([(first, end, _NUM_TOKENS), (second, e, 1)]) for e in longer)
        return torch.equal(wide[-_NUM_TOKENS:], alone) and all(
            torch.equal(beside[:_NUM_TOKENS], alone) for beside in others
        )

    def _attend(self, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """[tokens, num_heads, value_size] of rows given as (row, end, number of last tokens)."""
        plan = plan_forward(
            [ForwardRow(row, [0] * count, end - count, 0) for row, end, count in rows],
            self._cache,
            self._padding,
        )
        places = torch.cat([torch.arange(end - count, end) for _, end, count in rows])
        missing = plan.input_ids.shape[1] - len(places)
        places = torch.cat([places, places[:1].expand(missing)]).to(self._queries.device)
        attention = PlannedAttention(plan, self._cache, self._padding)
        attended = attention.attend(
            0,
            self._queries[places],
            self._keys[places],
            self._values[places],
            scale=self._queries.shape[-1] ** -0.5,
            **self._asked,
        )
        return attended[: plan.num_tokens]
