"""Makes further heads for an engine that is running: read, checked, given a cache, measured."""

from pathlib import Path

import psutil
import torch

from engine.config import HeadSource
from engine.drafter.head.assembly import (
    MadeHead,
    ReadyHead,
    attach_head,
    plan_head,
    prepare_head,
    tokens_per_block,
)
from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.file_names import WEIGHTS
from engine.drafter.head.files import read_config
from engine.kv_storage import KVCacheShape
from engine.loader import LoadedModel
from engine.row_cache import RowCache
from engine.sampler import Sampler

_SHARE_OF_FREE_MEMORY = 0.5  # the rest is for what grows while requests run
_FLOAT32_OVER_STORED = 2  # a head is stored in two bytes a weight and read in four


class HeadLoader:
    """Over a loaded target; `like` is its cache, which a head's has as many rows as.

    most_bytes: that a further head may take; None is half of what is free when it is asked for.
    """

    def __init__(
        self,
        target: LoadedModel,
        like: RowCache,
        sampler: Sampler,
        most_bytes: int | None = None,
    ) -> None:
        self._target = target
        self._like = like
        self._sampler = sampler
        self._most_bytes = most_bytes

    def load(self, source: HeadSource) -> ReadyHead:
        """The head of a folder; slow, from any thread, while the target runs.

        Raises HeadFormatError naming the head and what is wrong with it.
        """
        try:
            self._check_memory(Path(source.folder))
            plan = plan_head(f"head:{source.name}", source.folder, self._target)
            return prepare_head(plan, self._like)
        except (ValueError, OSError) as error:
            raise HeadFormatError(f"heads.{source.name}: {error}") from error

    def attach(self, ready: ReadyHead) -> MadeHead:
        """From the engine's thread, between two steps."""
        return attach_head(ready, self._target.model, self._sampler, is_by_name_only=True)

    def _check_memory(self, folder: Path) -> None:
        needed = self._bytes_of(read_config(folder), folder)
        most = self._most_bytes
        if most is None:
            most = int(_SHARE_OF_FREE_MEMORY * _free_bytes(self._target.model.device))
        if needed > most:
            raise HeadFormatError(
                f"memory: weights and cache need {needed / 2**20:.0f} MiB, of which "
                f"{most / 2**20:.0f} MiB may be taken"
            )

    def _bytes_of(self, config: HeadConfig, folder: Path) -> int:
        model, size = self._target.model, config.head_size
        shape = KVCacheShape(1, config.num_kv_heads, size, size, model.dtype, model.device)
        per_block = tokens_per_block(self._like)
        num_blocks = self._like.max_num_rows * -(-self._like.max_tokens // per_block)
        weights = _FLOAT32_OVER_STORED * (folder / WEIGHTS).stat().st_size
        return weights + num_blocks * per_block * shape.bytes_per_token


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
