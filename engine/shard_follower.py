"""A process that holds a shard of the target and does what the leader says (engine/shards.py)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache

from engine.config import EngineConfig
from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from engine.layout.plan import NO_PADDING, ForwardRow, Padding
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.suitability import cache_argument

_OWN_ATTENTIONS = ("eager", "sdpa")


def follow(config: EngineConfig) -> None:
    """Load the same target as the leader and follow it until it stops.

    Raises what loading raises, and RuntimeError when the leader is gone without a word.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load_model(
        config.target,
        dtype=config.dtype,
        device=config.device,
        num_shards=config.tensor_parallel,
    )
    if loaded.shards is None:
        raise ValueError("tensor_parallel: one process follows nobody")
    follower = _Follower(loaded)
    while (message := loaded.shards.receive())["kind"] != "stop":
        follower.obey(message)
    dist.destroy_process_group()


class _FollowedCache(KVCache):
    """Keys and values of this shard's heads; whose they are is the leader's business."""

    tables: Mapping[int, Sequence[int]]

    def block_table(self, row: int) -> Sequence[int]:
        return self.tables[row]


class _Follower:
    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model
        self._caches: dict[int, _FollowedCache] = {}
        self._runner: ModelRunner | None = None
        self._planned_attention = ""
        self._past: DynamicCache | None = None

    def obey(self, message: dict[str, Any]) -> None:
        for number in message["freed"]:
            del self._caches[number]
        kind = message["kind"]
        if kind == "cache":
            self._make_cache(message)
        elif kind == "forward":
            self._forward(message)
        elif kind == "call":
            self._call(message)
        elif kind == "copy":
            self._caches[message["cache"]].copy_slots(*message["places"])
        elif kind == "zero":
            self._caches[message["cache"]].zero_slots(*message["places"])
        else:
            raise ValueError(f"kind: {kind!r} is no message of a leader")

    def _make_cache(self, message: Mapping[str, Any]) -> None:
        model = self._model
        num_layers, num_kv_heads, key_size, value_size = message["shape"]
        shape = KVCacheShape(
            num_layers, num_kv_heads, key_size, value_size, model.dtype, model.device
        )
        max_num_rows, max_tokens, num_blocks, block_size = message["sizes"]
        self._caches[message["number"]] = _FollowedCache(
            shape,
            max_num_rows=max_num_rows,
            max_tokens=max_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
        )

    def _forward(self, message: Mapping[str, Any]) -> None:
        cache = self._caches[message["cache"]]
        cache.tables = {int(row): blocks for row, blocks in message["blocks"].items()}
        padding = Padding(*message["padding"])
        if self._runner is None:
            self._runner = ModelRunner(self._model, cache, NO_PADDING)
            self._planned_attention = self._model.config._attn_implementation
        self._runner.cache, self._runner.padding = cache, padding
        self._runner.forward([ForwardRow(**row) for row in message["rows"]])

    @torch.inference_mode()
    def _call(self, message: Mapping[str, Any]) -> None:
        """The model by its own attention. What the leader records there is local to it."""
        model, wanted, num_past = self._model, message["attention"], message["num_past"]
        model.set_attn_implementation(wanted if wanted in _OWN_ATTENTIONS else _OWN_ATTENTIONS[0])
        arguments: dict[str, Any] = {}
        keep = message["keep"]
        if keep is not None:
            positions = isinstance(keep, list)
            arguments["logits_to_keep"] = (
                torch.tensor(keep, device=model.device) if positions else keep
            )
        if num_past is not None:
            if num_past == 0:  # a leader reads one text at a time
                self._past = DynamicCache(config=model.config)
            arguments[cache_argument(model)] = self._past
        try:
            model(
                input_ids=torch.tensor([message["token_ids"]], device=model.device),
                use_cache=num_past is not None,
                **arguments,
            )
        finally:
            if self._planned_attention:
                model.set_attn_implementation(self._planned_attention)
