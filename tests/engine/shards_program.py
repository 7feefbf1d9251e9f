"""One of the processes of test_shards: the first one generates and prints, the others follow.

python -m tests.engine.shards_program MODEL NUM_SHARDS
"""

import json
import os
import sys
import time
from typing import Any

from engine.audit import AuditVerdict
from engine.config import AuditConfig, EngineConfig, SpeculationConfig
from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams, StoppingParams
from engine.shard_follower import follow

PREFIX = tuple(range(3, 40)) * 2
NUM_REQUESTS = 7  # more than rows, so that some reuse the keys of those before


def config_of(model: str, num_shards: int) -> EngineConfig:
    return EngineConfig(
        target=model,
        dtype="float32",
        device="cpu",
        num_threads=1,
        max_num_rows=3,
        kv_cache_memory=5e7,
        tensor_parallel=num_shards,
        speculation=SpeculationConfig(drafters=("prompt_lookup",)),
        audit=AuditConfig(share=1.0),
    )


def request(index: int) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"r{index}",
        prompt_token_ids=(*PREFIX, 50 + index, *PREFIX[:index]),
        sampling=SamplingParams(temperature=0.7 * (index % 2), seed=index),
        stopping=StoppingParams(max_tokens=24, ignore_eos=True),
        arrived_at=time.monotonic(),
    )


def generate(engine: Engine) -> dict[str, Any]:
    """What the engine made of some requests, greedy and sampled, with a prefix in common."""
    waiting = [request(index) for index in range(NUM_REQUESTS)]
    tokens: dict[str, list[int]] = {}
    num_cached = 0
    while waiting or engine.has_work():
        if waiting:  # one after the other, so that keys are copied from rows that run
            engine.submit(waiting.pop(0))
        output = engine.step()
        engine.check_integrity()
        for delta in output.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        for stats in output.finished:
            assert stats.error is None, stats.error
            num_cached += stats.num_cached_prompt_tokens
    verdicts = []
    while (finding := engine.audit_next()) is not None:
        verdicts.append(finding.verdict is AuditVerdict.EXACT)
    return {
        "tokens": tokens,
        "num_cached": num_cached,
        "audits": verdicts,
        "guarantee": engine.info.guarantee,
    }


if __name__ == "__main__":
    config = config_of(sys.argv[1], int(sys.argv[2]))
    if os.environ["RANK"] == "0":
        print(json.dumps(generate(Engine.from_config(config))))
    else:
        follow(config)
