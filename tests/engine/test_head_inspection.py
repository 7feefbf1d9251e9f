"""Inspection lists every mismatch at once, and agrees with what loading refuses."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.file_names import CARD, CONFIG, WEIGHTS
from engine.drafter.head.files import load_head, save_head
from engine.drafter.head.inspection import Mismatch, mismatches
from engine.loader import LoadedModel
from tests.engine.heads import config_for, random_head, tiny_target


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


def _saved(folder: Path, target: LoadedModel, *, is_slim: bool = False) -> Path:
    head = random_head(target, config_for(target, 200), list(range(3, 203)))
    card = {"target_fingerprint": target.fingerprint}
    save_head(folder, head, card, dtype=torch.float32, is_slim=is_slim)
    return folder


def _edit(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    for path, value in changes.items():
        *parents, last = path.split("__")
        table = content
        for parent in parents:
            table = table[parent]
        table[last] = value
    (folder / CONFIG).write_text(json.dumps(content))


def _fields(found: list[Mismatch], *, is_fatal: bool = True) -> set[str]:
    return {m.field for m in found if m.is_fatal is is_fatal}


@pytest.mark.parametrize("is_slim", [False, True])
def test_a_head_that_fits_has_none(target: LoadedModel, tmp_path: Path, is_slim: bool) -> None:
    folder = _saved(tmp_path, target, is_slim=is_slim)
    assert mismatches(folder, target) == []
    load_head(folder, target.model, target_fingerprint=target.fingerprint)


def test_all_mismatches_are_listed_at_once(target: LoadedModel, tmp_path: Path) -> None:
    folder = _saved(tmp_path, target)
    (folder / CARD).write_text(json.dumps({"target_fingerprint": "another"}))
    _edit(folder, eagle_aux_hidden_state_layer_ids=[2, 4, 99])
    _edit(folder, transformer_layer_config__intermediate_size=48)
    state = load_file(folder / WEIGHTS)
    del state["norm.weight"]
    state["fc.weight"][0, 0] = float("inf")
    save_file(state | {"extra": torch.zeros(1)}, folder / WEIGHTS)
    found = _fields(mismatches(folder, target))
    assert found == {
        "target_fingerprint",
        "eagle_aux_hidden_state_layer_ids",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "fc.weight",
        "extra",
    }


Change = Callable[[Path, dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder, state: state.pop("d2t"), "d2t"),
        (lambda folder, state: state["d2t"].fill_(9999), "d2t"),
        (lambda folder, state: state["t2d"].fill_(True), "t2d"),
        (lambda folder, state: state.pop("lm_head.weight"), "lm_head.weight"),
        (lambda folder, state: _edit(folder, norm_output=None), "config.json"),
        (lambda folder, state: (folder / CARD).write_text("["), "drafter_card.json"),
    ],
)
def test_what_is_fatal_here_is_refused_by_loading(
    target: LoadedModel, tmp_path: Path, change: Change, field: str
) -> None:
    folder = _saved(tmp_path, target)
    state = load_file(folder / WEIGHTS)
    change(folder, state)
    save_file(state, folder / WEIGHTS)
    assert field in _fields(mismatches(folder, target))
    with pytest.raises(HeadFormatError):
        load_head(folder, target.model, target_fingerprint=target.fingerprint)


def test_what_only_drafts_badly_is_told_and_not_fatal(target: LoadedModel, tmp_path: Path) -> None:
    folder = _saved(tmp_path, target)
    _edit(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 5])
    _edit(folder, transformer_layer_config__max_position_embeddings=64)
    found = mismatches(folder, target)
    assert _fields(found) == set()
    assert _fields(found, is_fatal=False) == {
        "eagle_aux_hidden_state_layer_ids",
        "max_position_embeddings",
    }
    assert mismatches(folder, None) == []
    load_head(folder, target.model, target_fingerprint=target.fingerprint)


def test_a_head_of_another_width_is_named_by_its_sizes(target: LoadedModel, tmp_path: Path) -> None:
    folder = _saved(tmp_path, target)
    other = replace(target, fingerprint="another")
    assert _fields(mismatches(folder, other)) == {"target_fingerprint"}
    (folder / WEIGHTS).write_bytes(b"nothing")
    assert _fields(mismatches(folder, None)) == {WEIGHTS}
