"""A target over two processes writes what one process writes; what cannot be split is refused."""

import functools
import itertools
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from engine.config import AuditConfig, EngineConfig, HeadSource, SpeculationConfig
from engine.engine import Engine
from engine.loader import UnsupportedModelError, load_model
from engine.shards import BrokenShardsError, ShardError, Shards, join
from tests.engine.shards_program import NUM_REQUESTS, config_of, generate, request
from tests.ports import free_port
from tests.tiny import save_tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


def _start(rank: int, model: Path, port: int) -> "subprocess.Popen[str]":
    """A process as torchrun starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.engine.shards_program", str(model), "2"],
        cwd=ROOT,
        env={
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    port = free_port()
    processes = [_start(rank, model, port) for rank in range(2)]
    try:
        alone = generate(Engine.from_config(config_of(str(model), 1)))
        (printed, said), (_, said_by_follower) = (p.communicate(timeout=100) for p in processes)
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0, 0], said + said_by_follower
    together = json.loads(printed.splitlines()[-1])
    assert together["tokens"] == alone["tokens"]
    assert len(together["tokens"]) == NUM_REQUESTS
    assert together["num_cached"] == alone["num_cached"] > 0  # keys were copied in both
    assert together["audits"] == [True] * NUM_REQUESTS
    assert together["guarantee"] in ("bit_exact", "rounding")


@pytest.fixture
def alone() -> Iterator[Shards]:
    """A group of one process, this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Shards(1)
    dist.destroy_process_group()


def test_a_forward_that_fails_ends_the_engine_and_no_request_alone(
    tmp_path: Path, alone: Shards
) -> None:
    model = str(save_tiny_model(tmp_path / "tiny"))
    engine = Engine.from_config(replace(config_of(model, 1), audit=AuditConfig()))
    target = engine._verifier.runner.model  # type: ignore[attr-defined]
    forward, num_calls = target.forward, itertools.count()

    @functools.wraps(forward)
    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(num_calls) == 3:
            raise ValueError("planted")
        return forward(*args, **kwargs)

    target.forward = failing
    alone.lead(target)
    for index in range(2):
        engine.submit(request(index))
    outputs = itertools.islice(iter(engine.step, None), 100)
    with pytest.raises(BrokenShardsError, match="ValueError: planted"):
        deque(outputs, maxlen=0)
    # It stays broken: the followers would take the next message for something else.
    with pytest.raises(BrokenShardsError):
        engine.step()
    assert next(num_calls) == 4


def test_a_follower_that_is_gone_breaks_the_shards(
    alone: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "broadcast", gone)
    with pytest.raises(BrokenShardsError, match="closed by peer"):
        alone.announce("zero", cache=0, places=[0, 1])
    monkeypatch.undo()
    with pytest.raises(BrokenShardsError, match="has failed"):
        alone.announce("zero", cache=0, places=[0, 1])


def test_a_model_that_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    model = str(save_tiny_model(tmp_path / "tiny"))
    with pytest.raises(UnsupportedModelError, match="3 processes cannot share num_attention_heads"):
        load_model(model, dtype="float32", device="cpu", num_shards=3)
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "gpt2"
    )
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(UnsupportedModelError, match="no plan to split 'gpt2'"):
        load_model(str(tmp_path / "gpt2"), dtype="float32", device="cpu", num_shards=2)


def test_without_the_other_processes_the_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ShardError, match="2 processes are asked for and 1 were started"):
        join(2, torch.device("cpu"))


def test_what_needs_the_whole_target_in_one_process_is_refused() -> None:
    head = SpeculationConfig(more_heads=(HeadSource("x", "folder"),))
    with pytest.raises(ValueError, match=r"tensor_parallel.*heads need the whole target"):
        EngineConfig(target="x", tensor_parallel=2, speculation=head)
    with pytest.raises(ValueError, match=r"tensor_parallel.*'ragged'"):
        EngineConfig(target="x", tensor_parallel=2, layout="aligned")
