"""Who listens to a model's hidden states; a forward that runs no hooks must tell them itself."""

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn


class StateListener(Protocol):
    """Keeps the inputs [1, N, H] of some layers of the latest forward."""

    layers: tuple[int, ...]

    def heard(self) -> dict[int, torch.Tensor]:
        """By layer, what the latest forward had; it is forgotten here."""

    def hear(self, states: dict[int, torch.Tensor]) -> None:
        """Keep these as the latest forward's: of one that ran no hooks, or padded its tokens."""


_listeners: weakref.WeakKeyDictionary[nn.Module, list[StateListener]] = weakref.WeakKeyDictionary()


def listeners_of(model: nn.Module) -> Sequence[StateListener]:
    """Who listens to the model now."""
    return _listeners.get(model, ())


def add_listener(model: nn.Module, listener: StateListener) -> None:
    _listeners.setdefault(model, []).append(listener)


def remove_listener(model: nn.Module, listener: StateListener) -> None:
    """Nothing happens if it does not listen."""
    if listener in _listeners.get(model, ()):
        _listeners[model].remove(listener)
