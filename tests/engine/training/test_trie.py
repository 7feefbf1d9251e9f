"""Paths packed behind a conversation get the logits that each would get alone."""

import torch

from engine.training.trie import pack, states_of
from tests.engine.head.heads import deep_tiny_llama

TEXT = [5, 9, 17, 30, 8, 44, 45, 46]
PATHS = [[[20, 21, 22], [20, 21, 23], [60, 61, 62]], [[45, 46, 7], [99, 98, 97]]]
CONTEXTS = [3, 5]


def test_packed_paths_are_scored_as_if_each_were_alone() -> None:
    target = deep_tiny_llama()
    packed = pack(TEXT, CONTEXTS, PATHS)
    states = states_of(target, packed)
    for context, paths, places in zip(CONTEXTS, PATHS, packed.places, strict=True):
        for path, place in zip(paths, places, strict=True):
            alone = torch.tensor([[*TEXT[: context + 1], *path[:-1]]])
            with torch.inference_mode():
                expected = target.base_model(input_ids=alone).last_hidden_state[0, context:]
            assert torch.allclose(states[place], expected, atol=1e-4)


def test_shared_beginnings_are_packed_once() -> None:
    packed = pack(TEXT, CONTEXTS, PATHS)
    # Of context 3: 20, 21, 60, 61; of context 5: 45, 46, 99, 98. Last drafts need no node.
    assert len(packed.token_ids) == len(TEXT) + 8
    assert packed.places[0][0][:2] == packed.places[0][1][:2]
