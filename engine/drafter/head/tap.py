"""Listens to the hidden states that enter some layers of a model while it runs."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from engine.loader import UnsupportedModelError
from engine.state_listeners import add_listener, remove_listener


def default_captured_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 reads: early, middle and late (indices of the layer's input).

    Raises UnsupportedModelError for a model of fewer than three layers.
    """
    if num_layers < 3:
        raise UnsupportedModelError(f"a head needs a target of 3 layers or more, not {num_layers}")
    last = max(2, num_layers - 3) if num_layers >= 6 else num_layers - 1
    first = min(2, last - 2)
    middle = min(max(num_layers // 2, first + 1), last - 1)
    return first, middle, last


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The model's stack of layers. Raises UnsupportedModelError where there is no one stack."""
    num_layers = model.config.get_text_config().num_hidden_layers
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and num_layers
    ]
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its {num_layers} layers were not found, so that no head "
            "can read its hidden states"
        )
    return stacks[0]


class HiddenStateTap:
    """Keeps the inputs of `layers` of the latest forward, side by side."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        stack = decoder_layers(model)
        if not layers or max(layers) >= len(stack):
            raise UnsupportedModelError(
                f"eagle_aux_hidden_state_layer_ids: {list(layers)} are not layers of a target "
                f"that has {len(stack)}"
            )
        self.layers = tuple(layers)
        self._states: dict[int, torch.Tensor] = {}
        self._hooks: list[RemovableHandle] = [
            stack[layer].register_forward_pre_hook(self._hook(layer), with_kwargs=True)
            for layer in self.layers
        ]
        self._model = weakref.ref(model)
        add_listener(model, self)

    def _hook(self, layer: int) -> Any:
        def keep(module: nn.Module, arguments: Any, named: Any) -> None:
            self._states[layer] = arguments[0] if arguments else named["hidden_states"]

        return keep

    def take(self) -> torch.Tensor:
        """[..., 3H] of the latest forward; a second call without a forward raises KeyError."""
        found = torch.cat([self._states[layer] for layer in self.layers], dim=-1)
        self._states.clear()
        return found

    def heard(self) -> dict[int, torch.Tensor]:
        """See StateListener."""
        found = dict(self._states)
        self._states.clear()
        return found

    def hear(self, states: dict[int, torch.Tensor]) -> None:
        """See StateListener."""
        self._states = dict(states)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._states.clear()
        model = self._model()
        if model is not None:
            remove_listener(model, self)
