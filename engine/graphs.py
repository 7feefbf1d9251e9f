"""Whether a model's forwards run in buckets and as CUDA graphs, decided and tried at start."""

import logging

import torch

from engine.agreement import agrees
from engine.bucketed_forward import GraphRecorder, NoRecorder, Recorder
from engine.config import Graphs
from engine.layout.plan import ForwardRow
from engine.model_runner import ModelRunner
from engine.suitability import sample_token_ids
from engine.target_runner import TargetRunner

_NUM_TRIED = 6  # forwards of one bucket: the second is recorded, the others are replayed
_logger = logging.getLogger(__name__)


def use_graphs(runner: TargetRunner, graphs: Graphs) -> None:
    """Buckets over the runner's present cache, where `graphs` wants them and it can have them.

    "auto" wants CUDA graphs and leaves them off, with a warning, where they do not give the
    logits of forwards without. Raises ValueError when "bucketed" is asked of a runner that has no
    small blocks, or shards.
    """
    if not isinstance(runner, ModelRunner):
        return
    cache = runner.cache
    can_have_them = not cache.is_contiguous and cache.shape.shards is None
    if graphs == "bucketed":
        if not can_have_them:
            raise ValueError("graphs: 'bucketed' needs small blocks: set kv_block_size")
        runner.use_buckets(NoRecorder())
    elif graphs == "auto" and cache.shape.device.type == "cuda" and can_have_them:
        try_recorder(runner, GraphRecorder(cache.shape.device))


def try_recorder(runner: ModelRunner, recorder: Recorder) -> None:
    """Buckets with this recorder, if what it records computes what is computed without."""
    runner.use_buckets(recorder)
    if not _is_sound(runner):
        _logger.warning("CUDA graphs change this model's logits here: they stay off")
        runner.buckets = None


def _is_sound(runner: ModelRunner) -> bool:
    """One row decoded a token at a time, with its bucket and without."""
    cache, buckets = runner.cache, runner.buckets
    vocab_size = runner.model.config.get_text_config().vocab_size
    token_ids = sample_token_ids(vocab_size, min(_NUM_TRIED, cache.max_tokens - 1), seed=6)
    row, _ = cache.allocate_row(token_ids)
    try:
        cache.reserve(row, len(token_ids))
        found: list[list[torch.Tensor]] = []
        for used in (buckets, None):
            runner.buckets = used
            rows = [[ForwardRow(row, [token], at, 1)] for at, token in enumerate(token_ids)]
            found.append([runner.forward(each).clone() for each in rows])
    finally:
        runner.buckets = buckets
        cache.free_row(row, keep=False)
    return all(agrees(one, other) for one, other in zip(*reversed(found), strict=True))
