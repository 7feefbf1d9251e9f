"""One target over several processes, started by torchrun: the first one leads, the others follow.

transformers' `tp_plan` gives every process a shard of each layer; each keeps the keys and values
of its own heads. Engine, scheduler and drafters run in the leader alone. Before it calls the model
or moves keys it tells the followers, which do the same (engine/shard_follower.py); the layers'
own sums then meet in the middle of the forward. A message is JSON, never a pickle: whoever
reaches the processes' port must not get code run.
"""

import datetime
import functools
import json
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

_NEVER = datetime.timedelta(days=3650)  # followers of an idle leader wait as long as it takes


class ShardError(ValueError):
    """Processes that do not fit each other, the setting or the model; the message says why."""


class BrokenShardsError(RuntimeError):
    """A call over several processes has failed: nobody knows where the others stand, so no request
    can go on and this process has to end. Whoever started the processes starts them all anew."""


def join(num_shards: int, device: torch.device) -> "Shards":
    """Meet the other processes of torchrun. Raises ShardError unless there are num_shards."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != num_shards or not dist.is_available():
        raise ShardError(
            f"tensor_parallel: {num_shards} processes are asked for and {started} were started; "
            f"start them with: torchrun --nproc-per-node {num_shards} --no-python tandem serve"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_NEVER)
    return Shards(num_shards)


class Shards:
    """The processes that share a target. Used by one thread of each.

    The leader calls announce and what builds on it, followers call receive.
    """

    def __init__(self, num_shards: int) -> None:
        self.num_shards = num_shards
        self.is_leader = dist.get_rank() == 0
        self._group = dist.new_group(backend="gloo", timeout=_NEVER)
        self._num_caches = 0
        self._freed: deque[int] = deque()
        self._is_announced = False
        self._is_broken = False

    # ---- messages ---------------------------------------------------------------------

    def announce(self, kind: str, **content: Any) -> None:
        """Tell the followers what comes next. Raises BrokenShardsError when one of them is gone,
        and after a forward that failed."""
        if self._is_broken:
            raise BrokenShardsError("a forward over several processes has failed")
        freed = [self._freed.popleft() for _ in range(len(self._freed))]
        message = json.dumps({"kind": kind, "freed": freed, **content}).encode()
        with self._breaking():
            dist.broadcast(torch.tensor([len(message)]), 0, group=self._group)
            dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self._group)

    def receive(self) -> dict[str, Any]:
        """The leader's next message. Raises RuntimeError when the leader is gone."""
        size = torch.zeros(1, dtype=torch.long)
        dist.broadcast(size, 0, group=self._group)
        message = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(message, 0, group=self._group)
        found: dict[str, Any] = json.loads(message.numpy().tobytes())
        return found

    def stop(self) -> None:
        """Let the followers end; those that are gone already need no word."""
        if not self._is_broken and not self._is_announced:
            with suppress(RuntimeError):
                self.announce("stop")
        dist.destroy_process_group()

    # ---- what a leader does -----------------------------------------------------------

    def lead(self, model: PreTrainedModel) -> None:
        """From now on every call of the model is announced."""
        forward = model.forward

        @functools.wraps(forward)
        def announced(*args: Any, **kwargs: Any) -> Any:
            if not self._is_announced:
                self._announce_plain(model, kwargs)
            with self._breaking():
                return forward(*args, **kwargs)

        model.forward = announced

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Around what every process has to get through."""
        try:
            yield
        except BaseException as error:
            self._is_broken = True
            if not isinstance(error, Exception):
                raise
            raise BrokenShardsError(
                f"a call over several processes has failed: {type(error).__name__}: {error}"
            ) from error

    def _announce_plain(self, model: PreTrainedModel, kwargs: Mapping[str, Any]) -> None:
        keep = kwargs.get("logits_to_keep")
        past = kwargs.get("past_key_values", kwargs.get("cache"))
        self.announce(
            "call",
            attention=model.config._attn_implementation,
            token_ids=kwargs["input_ids"][0].tolist(),
            keep=keep.tolist() if isinstance(keep, torch.Tensor) else keep,
            num_past=None if past is None else past.get_seq_length(),
        )

    @contextmanager
    def planned(
        self,
        cache: int,
        rows: Sequence[Mapping[str, Any]],
        blocks: Mapping[int, Sequence[int]],
        padding: Sequence[int],
    ) -> Iterator[None]:
        """Around a call of the model over the rows of a cache. blocks: of each row."""
        tables = {str(row): list(table) for row, table in blocks.items()}
        self.announce("forward", cache=cache, rows=list(rows), blocks=tables, padding=list(padding))
        self._is_announced = True
        try:
            yield
        finally:
            self._is_announced = False

    def new_cache(self, owner: object, shape: Sequence[int], sizes: Sequence[int | None]) -> int:
        """The number of a cache that every process makes; given back with its owner.

        shape: KVCacheShape.numbers; sizes: rows, tokens per row, blocks, tokens per block.
        """
        number = self._num_caches
        self._num_caches += 1
        # A finaliser may run in the middle of anything, so the followers hear of it later.
        weakref.finalize(owner, self._freed.append, number)
        self.announce("cache", number=number, shape=list(shape), sizes=list(sizes))
        return number


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether this process holds only a part of the model."""
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
