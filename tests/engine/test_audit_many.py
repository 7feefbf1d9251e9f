"""Ten thousand requests without a bug: the auditor accuses none of them (make test-audit)."""

import random
from collections import Counter

import pytest
import torch

from engine.audit import AuditVerdict
from engine.config import AuditConfig
from engine.request import AcceptanceRule, GenerationRequest, SamplingParams
from tests.engine.driver import request, tiny_engine
from tests.tiny import VOCAB_SIZE

NUM_REQUESTS = 10_000
NUM_LIVE = 24
KINDS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=30, top_p=0.95),
    SamplingParams(temperature=1.1, acceptance_rule=AcceptanceRule.REJECTION, top_k=8),
    SamplingParams(temperature=0, presence_penalty=0.7, frequency_penalty=0.4),
    SamplingParams(temperature=0.9, min_p=0.05, repetition_penalty=1.2),
)


def some_request(number: int, generator: random.Random) -> GenerationRequest:
    sampling = KINDS[number % len(KINDS)]
    if not sampling.is_greedy:
        sampling = SamplingParams(
            **{name: getattr(sampling, name) for name in sampling.__slots__ if name != "seed"},
            seed=number,
        )
    prompt = [generator.randrange(3, VOCAB_SIZE) for _ in range(generator.randrange(1, 20))]
    if number % 4 == 0:
        prompt = (prompt[:5] * 6)[:24]
    return request(
        f"request {number}",
        prompt,
        max_tokens=generator.randrange(2, 14),
        sampling=sampling,
        max_draft_tokens=generator.choice([None, 1, 2, 4]),
        tenant=generator.choice(["red", "blue"]),
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_ten_thousand_requests_without_a_bug_give_no_divergence(dtype: torch.dtype) -> None:
    engine = tiny_engine(
        dtype=dtype,
        drafters=("prompt_lookup", "draft_model"),
        max_num_rows=16,
        max_step_tokens=96,
        max_model_tokens=128,
        audit=AuditConfig(share=1.0, max_jobs=1000),
    )
    generator = random.Random(1)
    verdicts: Counter[AuditVerdict] = Counter()
    num_drafted, number = 0, 0
    while number < NUM_REQUESTS or engine.has_work():
        load = engine.load()
        is_due = load.num_audits_waiting > 100  # audits wait for idle time, so there must be some
        while (
            number < NUM_REQUESTS and not is_due and load.num_waiting + load.num_running < NUM_LIVE
        ):
            engine.submit(some_request(number, generator))
            number += 1
            load = engine.load()
        if generator.random() < 0.02:
            engine.cancel(f"request {number - 1 - generator.randrange(NUM_LIVE)}")
        num_drafted += sum(stats.num_draft_tokens for stats in engine.step().finished)
        if is_due and not engine.has_work():
            while (finding := engine.audit_next()) is not None:
                verdicts[finding.verdict] += 1
                assert finding.verdict is not AuditVerdict.DIVERGENCE, finding
    while (finding := engine.audit_next()) is not None:
        verdicts[finding.verdict] += 1
        assert finding.verdict is not AuditVerdict.DIVERGENCE, finding
    print(dtype, dict(verdicts), "drafts:", num_drafted)
    # Requests cancelled before their first token have nothing to audit.
    assert 0.98 * NUM_REQUESTS < verdicts.total() <= NUM_REQUESTS
    assert num_drafted > NUM_REQUESTS
    assert engine.breaker.num_trips == 0
