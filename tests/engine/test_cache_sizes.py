"""How much memory a cache may have, and when it takes it."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from engine.kv_cache import KVCache
from engine.kv_storage import KVCacheShape
from tests.engine.driver import tiny_engine
from tests.engine.test_scheduling import bytes_per_token


@pytest.mark.parametrize("share", [0.5, 0.125])
def test_a_share_is_of_the_memory_that_is_free_now(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(available=40 * 16 * bytes_per_token(()) / share)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    engine = tiny_engine(
        kv_cache_memory=share, kv_block_size=16, max_num_rows=8, max_model_tokens=128
    )
    assert engine._scheduler.cache.pool.num_blocks == 40


def test_a_cache_takes_memory_when_it_is_written_and_no_sooner() -> None:
    shape = KVCacheShape(1, 8, 64, 64, torch.float32, torch.device("cpu"))
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(shape, max_num_rows=64, max_tokens=2048, num_blocks=64)  # 512 MiB
    assert shape.bytes_per_token * 64 * 2048 == 2**29
    assert process.memory_info().rss - before < 2**26
    cache.keys[0][:2048] = 1.0
    assert 2**21 < process.memory_info().rss - before < 2**26
