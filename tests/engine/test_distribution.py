"""What the whole engine emits for many seeds has the target's joint distribution.

The model has eight tokens, so the probability of every output of three tokens is computed
from the model by itself, and the counts of many requests are compared with it.
"""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.acceptance import next_token_probs
from engine.request import AcceptanceRule, SamplingParams
from tests.engine.driver import request, run, tiny_engine
from tests.engine.sampling_reference import chi_square_p_value, joint_probs, reference_probs
from tests.tiny import related_draft, tiny_llama

pytestmark = pytest.mark.timeout(300)  # hundreds of steps on a machine that may be busy

VOCAB = 8
PROMPT = (2, 0, 2, 1, 2, 2, 2, 3, 2, 4, 2, 5, 2, 6, 2, 7, 2)  # any next token was there after 2
NUM_TOKENS = 3
NUM_REQUESTS = 800
NUM_ROWS = 32
COUPLED, REJECTION = AcceptanceRule.COUPLED, AcceptanceRule.REJECTION


@cache
def joint(params: SamplingParams) -> torch.Tensor:
    """[V] * NUM_TOKENS, from the model without the engine."""
    model = tiny_llama(vocab_size=VOCAB)
    logits: dict[tuple[int, ...], list[float]] = {}
    with torch.inference_mode():
        for length in range(NUM_TOKENS):
            prefixes = list(itertools.product(range(VOCAB), repeat=length))
            batch = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
            last = model(batch, use_cache=False).logits[:, -1].tolist()
            logits.update(zip(prefixes, last, strict=True))
    return joint_probs(
        lambda prefix: reference_probs(logits[prefix], params, PROMPT, prefix), VOCAB, NUM_TOKENS
    )


def p_value(params: SamplingParams, drafter: str, rule: AcceptanceRule) -> float:
    """Of the outputs of NUM_REQUESTS seeds against the joint distribution."""
    target = tiny_llama(vocab_size=VOCAB)
    engine = tiny_engine(
        target=target,
        draft=related_draft(target, 0.5) if drafter == "draft_model" else None,
        drafters=(drafter,),
        max_draft_tokens=2,
        numerics="fast",
        max_num_rows=NUM_ROWS,
        max_model_tokens=64,
    )
    requests = [
        request(
            f"r{seed}",
            PROMPT,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            sampling=replace(params, seed=seed, acceptance_rule=rule),
        )
        for seed in range(NUM_REQUESTS)
    ]
    counts = torch.zeros([VOCAB] * NUM_TOKENS)
    num_drafts = 0
    for start in range(0, NUM_REQUESTS, NUM_ROWS):
        outcome = run(engine, requests[start : start + NUM_ROWS])
        num_drafts += sum(stats.num_draft_tokens for stats in outcome.stats.values())
        for token_ids in outcome.token_ids.values():
            counts[tuple(token_ids)] += 1
    assert num_drafts > NUM_REQUESTS / 4, "hardly anything was drafted"
    return chi_square_p_value(counts, joint(params))


FLAT = SamplingParams(temperature=1.3)
FILTERED = SamplingParams(temperature=1.5, top_k=5, frequency_penalty=0.6, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("rule", "drafter", "params"),
    [
        (COUPLED, "draft_model", FILTERED),
        (REJECTION, "draft_model", FILTERED),
        (REJECTION, "prompt_lookup", FLAT),
    ],
)
def test_the_engine_emits_the_targets_joint_distribution(
    rule: AcceptanceRule, drafter: str, params: SamplingParams
) -> None:
    assert p_value(params, drafter, rule) > 1e-4


def _accepts_by_the_target_alone(target, draft, drafts, num_drafts, uniform, noise):  # type: ignore[no-untyped-def]
    width = drafts.shape[1]
    target_at = target[:, :width].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    passes = (uniform < target_at) & (torch.arange(width) < num_drafts.unsqueeze(1))
    accepted = passes.long().cumprod(dim=1).sum(dim=1)
    scores = next_token_probs(target, draft, accepted, num_drafts).log()
    return accepted, (scores + noise[torch.arange(len(drafts)), accepted]).argmax(dim=1)


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.verifier.accept_by_rejection", _accepts_by_the_target_alone)
    assert p_value(FLAT, "draft_model", REJECTION) < 1e-6
