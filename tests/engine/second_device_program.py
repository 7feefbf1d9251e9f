"""Runs the engine on the processor and on a second device: one JSON object of what differs."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.engine.second_device import DEVICE, crossings  # first: it changes how torch is set up

# isort: split
from engine.engine import Engine
from engine.request import (
    AcceptanceRule,
    SamplingParams,
    StructuredOutput,
    StructuredOutputKind,
)
from tests.engine.driver import request, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.tiny import related_draft, tiny_llama

_SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, seed=3, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(
        temperature=0.7, seed=2, acceptance_rule=AcceptanceRule.REJECTION, typical_p=0.9
    ),
    SamplingParams(
        temperature=0, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.2
    ),
    SamplingParams(temperature=1, seed=4, logit_bias=((5, 1.0),), banned_token_ids=(7, 8)),
)
_SETTINGS: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"drafters": ("prompt_lookup",)},
    "draft_model": {"drafters": ("draft_model",)},
    "small_blocks": {"drafters": ("prompt_lookup", "draft_model"), "kv_block_size": 16},
    "buckets": {
        "drafters": ("prompt_lookup", "draft_model"),
        "kv_block_size": 16,
        "graphs": "bucketed",
    },
    "head": {"drafters": ("head",)},
    "aligned": {"drafters": ("prompt_lookup",), "layout": "aligned"},
}


def run(device: torch.device, settings: dict[str, Any]) -> tuple[dict[str, list[int]], Engine, int]:
    """Tokens by request, the engine, and how many steps it took after the first."""
    options = dict(settings)
    target = tiny_llama()
    head = None
    if "head" in options["drafters"]:
        target = deep_tiny_llama()
        head = tempfile.mkdtemp()
        save_tiny_head(Path(head), tiny_head(target))
    draft = related_draft(target, 0.05).to(device) if "draft_model" in options["drafters"] else None
    engine = tiny_engine(
        target=target.to(device), draft=draft, head=head, max_num_rows=3, poison=None, **options
    )
    for number, sampling in enumerate(_SAMPLINGS):
        engine.submit(
            request(
                f"{number}",
                [5, 6, 7, 8] * (number + 2),
                max_tokens=7,
                sampling=sampling,
                min_tokens=3 if number else 0,
            )
        )
    grammar = StructuredOutput(StructuredOutputKind.REGEX, "[a-f]{3,9}")
    engine.submit(request("grammar", [9, 10, 11], max_tokens=5, structured_output=grammar))
    tokens: dict[str, list[int]] = {}
    num_steps = 0
    while engine.has_work():
        if num_steps == 1:
            crossings.clear()
        output = engine.step()
        engine.check_integrity()
        num_steps += 1
        for delta in output.deltas:
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens, engine, num_steps - 1


def main() -> None:
    found = {}
    for name, settings in _SETTINGS.items():
        expected, _, _ = run(torch.device("cpu"), settings)
        crossings.clear()
        tokens, engine, num_steps = run(DEVICE, settings)
        kinds: Counter[str] = Counter()
        for (kind, _), count in crossings.items():
            kinds[kind] += count
        found[name] = {
            "device": engine.info.device,
            "guarantee": engine.info.guarantee,
            "num_requests": len(tokens),
            "differing": [key for key in expected if expected[key] != tokens.get(key)],
            "num_steps": num_steps,
            "crossings": dict(kinds),
            "lines": {f"{kind}: {line}": n for (kind, line), n in crossings.items()},
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
