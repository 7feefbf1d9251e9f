"""What the event loop asks of the engine's thread, and how it is answered."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.request import FinishReason, GenerationRequest
from engine.stats import ModelInfo
from service.engine_contract import Engine

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerationRequest
    accepted: "asyncio.Future[None]"


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Change:
    """Something done to the engine between two steps."""

    apply: Callable[[Engine], ModelInfo]
    done: "asyncio.Future[ModelInfo]"


Command = Submit | Cancel | Change
Answer = tuple["asyncio.Future[None]", Exception | None]


def answer(answers: Sequence[Answer]) -> None:
    """Called on the loop, once for all commands of a turn."""
    for accepted, error in answers:
        if error is None:
            settle(accepted, None)
        else:
            fail(accepted, error)


def settle(future: "asyncio.Future[_T]", result: _T) -> None:
    if not future.done():  # else the caller has gone
        future.set_result(result)


def fail(future: "asyncio.Future[_T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
