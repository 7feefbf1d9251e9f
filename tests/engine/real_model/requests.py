"""Requests that are watched, their neighbours, and what they get when they are alone."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from tests.engine.driver import GREEDY, request
from tests.engine.real_model.engines import engine_of
from tests.engine.real_model.observation import Observed, observe

SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
NUM_NEW_TOKENS = 28
PROMPTS = {
    "greedy": (
        "Monday: the train leaves at nine. Tuesday: the train leaves at ten. "
        "Wednesday: the train leaves at eleven. Thursday: the train leaves at twelve. "
        "Friday: the train leaves at one. Monday: the train leaves at"
    ),
    "seeded": (
        "def area(width, height):\n    return width * height\n\n\n"
        "def volume(width, height, depth):\n    return width * height * depth\n\n\ndef "
    ),
}
SAMPLING = {"greedy": GREEDY, "seeded": SEEDED}
PROBED = tuple(PROMPTS)
LONG = (150, 330, 700, 1000)  # tokens of prompts: attention takes 512 keys at a time


def probed(engine: Engine, name: str, tenant: str, **options: Any) -> GenerationRequest:
    """The probed request under a name of its own; a tenant keeps prefixes apart."""
    return request(
        f"{name} {tenant}",
        engine.tokenizer(PROMPTS[name]).input_ids,
        max_tokens=NUM_NEW_TOKENS,
        sampling=SAMPLING[name],
        ignore_eos=True,
        tenant=tenant,
        **options,
    )


def neighbours(
    engine: Engine, count: int, tenant: str, seed: int, **options: Any
) -> list[GenerationRequest]:
    """Random tokens, lengths and sampling."""
    generator = random.Random(seed)
    return [
        request(
            f"neighbour {number} {tenant}",
            [generator.randrange(engine.info.vocab_size) for _ in range(generator.randint(2, 60))],
            max_tokens=generator.randint(4, NUM_NEW_TOKENS),
            sampling=generator.choice([GREEDY, SamplingParams(temperature=1.0, seed=number)]),
            mode=generator.choice(["on", "off"]),
            drafter="prompt_lookup",
            ignore_eos=True,
            tenant=tenant,
            **options,
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Reference:
    """A probed request alone: plain decoding, the prompt in one forward."""

    token_ids: list[int]
    logits: dict[int, torch.Tensor]


@cache
def alone(folder: Path, dtype: str) -> dict[str, Reference]:
    engine = engine_of(folder, dtype)
    found = {}
    for name in PROBED:
        item = probed(engine, name, "alone", mode="off")
        observed = observe(engine, [item])
        found[name] = Reference(
            observed.outcome.token_ids[item.request_id], observed.logits[item.request_id]
        )
    return found


def assert_same_bits(observed: Observed, request_id: str, reference: Reference) -> None:
    assert observed.outcome.token_ids[request_id] == reference.token_ids
    found = observed.logits[request_id]
    assert found.keys() == reference.logits.keys()
    assert len(found) == NUM_NEW_TOKENS
    for position, expected in reference.logits.items():
        assert torch.equal(found[position], expected), (request_id, position)


def assert_all_same_bits(folder: Path, dtype: str, observed: Observed, tenant: str) -> None:
    for name, reference in alone(folder, dtype).items():
        assert_same_bits(observed, f"{name} {tenant}", reference)


def long_requests(engine: Engine, tenant: str, **options: Any) -> list[GenerationRequest]:
    draw = random.Random(5)
    return [
        request(
            f"long {length} {tenant}",
            [draw.randrange(engine.info.vocab_size) for _ in range(length)],
            max_tokens=NUM_NEW_TOKENS,
            ignore_eos=True,
            tenant=tenant,
            **options,
        )
        for length in LONG
    ]
