"""Runs forwards in buckets (engine/layout/buckets.py), and replays CUDA graphs of them.

A graph is the list of kernels of one forward, recorded once and launched in one call; it reads and
writes the same memory every time. So the numbers of a step are copied to where the graph reads
them, and what it writes is read before the next step overwrites it. A bucket is recorded when it
comes up the second time; the buckets used longest ago give way to new ones.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.kv_cache import KVCache
from engine.layout.buckets import Bucket, choose_bucket, lay_out, plan_of
from engine.layout.plan import ForwardPlan, ForwardRow, Padding
from engine.state_listeners import StateListener
from engine.upload import upload, upload_together

MAX_RECORDED = 96  # a graph of a large model holds some MiB besides the pool that all share
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computed:
    """Of all tokens of a bucket: logits [N, V], and by layer the hidden states [1, N, H] that
    somebody listens to."""

    logits: torch.Tensor
    states: dict[int, torch.Tensor]


Compute = Callable[[], Computed]


class Recorder(Protocol):
    """Makes something that computes again what `compute` computes, from the same memory."""

    def record(self, compute: Compute) -> Compute: ...


class NoRecorder:
    """Computes operation by operation: buckets without graphs, on any device."""

    def record(self, compute: Compute) -> Compute:
        return compute


class GraphRecorder:
    """CUDA graphs that share one pool of memory: they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Compute) -> Compute:
        """Raises RuntimeError where `compute` does what a graph cannot hold, such as waiting for
        the device."""
        with torch.cuda.device(self._device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                compute()  # libraries choose and load their kernels now, not while recording
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                computed = compute()

        def replay() -> Computed:
            graph.replay()
            return computed

        return replay


@dataclass(slots=True)
class _Entry:
    """numbers: where the bucket's forward reads what to compute."""

    numbers: torch.Tensor
    run: Compute
    num_runs: int = 0
    is_recorded: bool = False


class BucketedForward:
    """The buckets of one model over one cache of small blocks."""

    def __init__(
        self,
        compute: Callable[[ForwardPlan], torch.Tensor],
        cache: KVCache,
        padding: Padding,
        listeners: Callable[[], Sequence[StateListener]],
        recorder: Recorder,
    ) -> None:
        """compute: the model's logits of every token of a plan over `cache`, nothing padded or
        left out. listeners: of the model's hidden states, now."""
        if cache.is_contiguous:
            raise ValueError("buckets need a cache of small blocks, with a scratch block")
        self.cache = cache
        self.num_recorded = 0
        self.align_nanoseconds = 0  # since this began
        self._compute = compute
        self._padding = padding
        self._listeners = listeners
        self._recorder = recorder
        self._entries: OrderedDict[tuple[Bucket, tuple[int, ...]], _Entry] = OrderedDict()

    @property
    def is_recording(self) -> bool:
        """Whether graphs are made; never again after one could not be."""
        return not isinstance(self._recorder, NoRecorder)

    def choose(self, rows: Sequence[ForwardRow]) -> Bucket | None:
        """None: compute these rows without a bucket."""
        return choose_bucket(rows, self.cache, self._padding)

    def forward(self, rows: Sequence[ForwardRow], bucket: Bucket) -> torch.Tensor:
        """Logits [sum of num_logits, V] in the order of rows. Listeners hear of the rows'
        tokens, not of what fills them up."""
        started = time.perf_counter_ns()
        numbers, places, wanted = lay_out(rows, self.cache, bucket)
        self.align_nanoseconds += time.perf_counter_ns() - started
        device = self.cache.shape.device
        entry = self._entry(bucket)
        # Before anything runs: the numbers of an earlier step name slots that others may own now.
        entry.numbers.copy_(upload(numbers, device))
        if entry.num_runs == 1 and self.is_recording:
            self._record(entry, bucket)
        entry.num_runs += 1
        computed = entry.run()
        token_index, logit_index = upload_together([places, wanted], device)
        for listener in self._listeners():
            states = {n: computed.states[n].index_select(1, token_index) for n in listener.layers}
            listener.hear(states)
        return computed.logits.index_select(0, logit_index)

    def _entry(self, bucket: Bucket) -> _Entry:
        """Made for the layers that are listened to now: a graph records what is kept of them."""
        layers = tuple(sorted({layer for one in self._listeners() for layer in one.layers}))
        key = (bucket, layers)
        entry = self._entries.get(key)
        if entry is None:
            size = self.cache.block_size
            device = self.cache.shape.device
            numbers = torch.zeros(bucket.num_numbers(size), dtype=torch.long, device=device)

            def compute() -> Computed:
                logits = self._compute(plan_of(numbers, bucket, size))
                states: dict[int, torch.Tensor] = {}
                for listener in self._listeners():
                    states |= listener.heard()
                return Computed(logits, states)

            entry = self._entries[key] = _Entry(numbers, compute)
            if len(self._entries) > MAX_RECORDED:
                self._entries.popitem(last=False)
        self._entries.move_to_end(key)
        return entry

    def _record(self, entry: _Entry, bucket: Bucket) -> None:
        try:
            entry.run = self._recorder.record(entry.run)
        except RuntimeError as error:
            _logger.warning("%s cannot be a CUDA graph, none is made any more: %s", bucket, error)
            self._recorder = NoRecorder()
            return
        entry.is_recorded = True
        self.num_recorded += 1
