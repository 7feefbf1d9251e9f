"""Desynchronisations planted in the layouts that move rows: a divergence each, and never a tie."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from engine.aligned_runner import AlignedRunner
from engine.audit import AuditVerdict
from engine.engine import Engine
from engine.layout.aligned import AlignedCache
from tests.engine.driver import run
from tests.engine.test_audit import audited_engine, findings, greedy_and_seeded, plant_draft_bonus

pytestmark = pytest.mark.thorough
Layers = tuple[torch.Tensor, ...]


def engine_of(layout: str, dtype: torch.dtype) -> Engine:
    options = {"group_rows": 2} if layout == "grouped" else {}
    return audited_engine(dtype, layout=layout, **options)


@cache
def sound_outputs(layout: str, dtype: torch.dtype) -> dict[str, list[int]]:
    engine = engine_of(layout, dtype)
    found = run(engine, greedy_and_seeded()).token_ids
    assert all(f.verdict is not AuditVerdict.DIVERGENCE for f in findings(engine).values())
    return found


# ---- bugs in what a forward is told ----------------------------------------------------------


def shift_positions(arguments, rectangle):  # type: ignore[no-untyped-def]
    arguments["position_ids"] += (arguments["position_ids"] > 20).long()


def make_hole(arguments, rectangle):  # type: ignore[no-untyped-def]
    for row, pad in zip(arguments["attention_mask"], rectangle.pads, strict=True):
        row[pad + 1] = 0


def show_one_column_more(arguments, rectangle):  # type: ignore[no-untyped-def]
    """Left of a row's tokens: what the longer neighbour's length made of it."""
    for row, pad in zip(arguments["attention_mask"], rectangle.pads, strict=True):
        if pad:
            row[pad - 1] = 1


ARGUMENTS: dict[str, Callable[[dict[str, torch.Tensor], object], None]] = {
    "position off by one": shift_positions,
    "a hole in the mask": make_hole,
    "a length one too long": show_one_column_more,
}

# ---- bugs in what is kept of a forward -------------------------------------------------------


def keep_stale_key(layers: Layers) -> Layers:
    found = tuple(layer.clone() for layer in layers)
    for layer in found:
        layer[:, :, -1] = layer[:, :, -2]
    return found


def swap_neighbours(layers: Layers) -> Layers:
    found = tuple(layer.clone() for layer in layers)
    for layer in found:
        layer[:, :, -1] = layer[:, :, -1].roll(1, 0)
    return found


KEPT: dict[str, Callable[[Layers], Layers]] = {
    "a stale key": keep_stale_key,
    "a neighbour's slot": swap_neighbours,
}


def plant(bug: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In serving alone: an audit computes in a cache of its own."""
    served = engine._scheduler.cache
    arguments_of, grow = AlignedRunner._arguments, AlignedCache.grow

    def changed(self, rows, rectangle, width):  # type: ignore[no-untyped-def]
        arguments = arguments_of(self, rows, rectangle, width)
        if self.cache is served:
            ARGUMENTS[bug](arguments, rectangle)
        return arguments

    def grown(self, rows, keys, values):  # type: ignore[no-untyped-def]
        if self is served and keys[0].shape[2] > 1:
            keys, values = KEPT[bug](tuple(keys)), KEPT[bug](tuple(values))
        return grow(self, rows, keys, values)

    if bug in ARGUMENTS:
        monkeypatch.setattr(AlignedRunner, "_arguments", changed)
    elif bug in KEPT:
        monkeypatch.setattr(AlignedCache, "grow", grown)
    else:
        plant_draft_bonus(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["aligned", "grouped"])
@pytest.mark.parametrize("bug", [*ARGUMENTS, *KEPT, "draft's bonus"])
def test_every_planted_desynchronisation_is_a_divergence_and_no_tie(
    bug: str, layout: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = sound_outputs(layout, dtype)
    engine = engine_of(layout, dtype)
    _ = engine._parts.auditor.epsilon  # calibrated while all was well
    plant(bug, engine, monkeypatch)
    served = run(engine, greedy_and_seeded()).token_ids
    wrong = {name for name in sound if served[name] != sound[name]}
    assert wrong, "the planted bug changed nothing"
    for name, finding in findings(engine).items():
        is_divergence = finding.verdict is AuditVerdict.DIVERGENCE
        assert is_divergence == (name in wrong), (name, finding)
    assert engine.breaker.num_trips >= 1
