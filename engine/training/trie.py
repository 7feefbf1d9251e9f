"""Many draft paths behind one conversation, scored by the target in a single forward.

Paths of a context share their beginnings: they are packed as a trie, each node once, behind
the conversation's own tokens. A node sees the conversation up to its context and its own
ancestors, and nothing else, which a four-dimensional mask says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class PackedPaths:
    """The conversation's T tokens and the trie's nodes behind them, N in all.

    places[c][s] lists, for path s of context c, the index in the packed sequence whose state
    predicts draft 1, 2, ...: the context's last token first, then the path's nodes.
    """

    token_ids: list[int]
    position_ids: list[int]
    visible: torch.Tensor  # [N, N] bool
    places: list[list[list[int]]]


def pack(
    token_ids: Sequence[int], contexts: Sequence[int], paths: Sequence[Sequence[Sequence[int]]]
) -> PackedPaths:
    """contexts: index of the last token that each context has seen. paths[c]: its paths' draft
    tokens; the last one of a path needs no node, for nothing follows it."""
    packed, positions = list(token_ids), list(range(len(token_ids)))
    parents: list[int] = [-1] * len(token_ids)
    roots: list[int] = [-1] * len(token_ids)
    places: list[list[list[int]]] = []
    for context, group in zip(contexts, paths, strict=True):
        nodes: dict[tuple[int, ...], int] = {}
        found = []
        for path in group:
            place = [context]
            for depth in range(1, len(path)):
                key = tuple(path[:depth])
                node = nodes.get(key)
                if node is None:
                    node = nodes[key] = len(packed)
                    packed.append(path[depth - 1])
                    positions.append(context + depth)
                    parents.append(place[-1] if depth > 1 else -1)
                    roots.append(context)
                place.append(node)
            found.append(place)
        places.append(found)
    num_tokens, total = len(token_ids), len(packed)
    visible = torch.zeros(total, total, dtype=torch.bool)
    visible[:num_tokens, :num_tokens] = torch.ones(num_tokens, num_tokens).tril().bool()
    for node in range(num_tokens, total):
        if parents[node] >= 0:
            visible[node] = visible[parents[node]]
        else:
            visible[node, : roots[node] + 1] = True
        visible[node, node] = True
    return PackedPaths(packed, positions, visible, places)


@torch.inference_mode()
def states_of(model: PreTrainedModel, packed: PackedPaths) -> torch.Tensor:
    """[N, H]: what the target's output layer reads at every packed token."""
    device, dtype = model.device, model.dtype
    mask = torch.zeros(packed.visible.shape, dtype=dtype)
    mask.masked_fill_(~packed.visible, torch.finfo(dtype).min)
    output = model.base_model(
        input_ids=torch.tensor([packed.token_ids], device=device),
        position_ids=torch.tensor([packed.position_ids], device=device),
        attention_mask=mask[None, None].to(device),
        use_cache=False,
    )
    states: torch.Tensor = output.last_hidden_state[0]
    return states
