"""Reads a head of any dialect beside its target: translated, completed, checked."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.dialects import our_config, our_tensors, recognize
from engine.drafter.head.file_names import CONFIG
from engine.drafter.head.files import check_fits, wrong_with, wrong_with_vocabulary
from engine.drafter.head.model import Eagle3Head
from engine.loader import LoadedModel

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class Imported:
    """A translated head, in float32 and complete, and what had to be decided for it."""

    dialect: str
    head: Eagle3Head
    notes: tuple[str, ...]


def import_head(
    folder: Path,
    target: LoadedModel,
    *,
    undo_rope_scaling: bool = False,
    num_draft_tokens: int = 4,
) -> Imported:
    """Raises HeadFormatError naming what is missing, unknown or not supported."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HeadFormatError(f"{path}: {error}") from error
    state = _read_weights(folder)
    dialect = recognize(content, set(state))
    notes: list[str] = []
    state = our_tensors(dialect, state, folder, notes)
    config = our_config(
        dialect,
        content,
        state,
        target.model.config.get_text_config().num_hidden_layers,
        notes,
        undo_rope_scaling=undo_rope_scaling,
        num_draft_tokens=num_draft_tokens,
    )
    check_fits(config, target.model)
    config = replace(
        config, target_name=target.name, target_architecture=type(target.model).__name__
    )
    return Imported(dialect, _fill(config, state, target, notes), tuple(notes))


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    for name in _WEIGHTS:
        path = folder / name
        if path.is_file():
            if path.suffix == ".safetensors":
                return load_file(path)
            found = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(found, dict):
                raise HeadFormatError(f"{path}: holds no tensors by name")
            return found
    raise HeadFormatError(f"{folder}: has none of {_WEIGHTS}")


def _fill(
    config: HeadConfig,
    state: dict[str, torch.Tensor],
    target: LoadedModel,
    notes: list[str],
) -> Eagle3Head:
    head = Eagle3Head(config)
    expected = head.state_dict()
    _complete(config, state, target, notes)
    missing, unknown = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or unknown:
        raise HeadFormatError(f"missing tensors {sorted(missing)}, unknown {sorted(unknown)}")
    for name, tensor in state.items():
        if reason := wrong_with(name, tensor, expected[name]):
            raise HeadFormatError(f"{name}: {reason}")
    if found := wrong_with_vocabulary(state["d2t"], state["t2d"], config.vocab_size):
        raise HeadFormatError(f"{found[0]}: {found[1]}")
    head.load_state_dict(state)
    return head.eval().requires_grad_(False)


def _complete(
    config: HeadConfig, state: dict[str, torch.Tensor], target: LoadedModel, notes: list[str]
) -> None:
    for name in [name for name in state if name.endswith("rotary_emb.inv_freq")]:
        del state[name]
    if config.draft_vocab_size == config.vocab_size:
        state.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
    if "d2t" not in state:
        raise HeadFormatError(
            "d2t: is missing and draft_vocab_size is reduced; the first ids would be wrong"
        )
    token_ids = torch.arange(len(state["d2t"])) + state["d2t"].long()
    if bool(((token_ids < 0) | (token_ids >= config.vocab_size)).any()):
        raise HeadFormatError("d2t: points outside the vocabulary")
    if "t2d" not in state:
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        state["t2d"][token_ids] = True
    if "embed_tokens.weight" not in state:
        weight = torch.as_tensor(target.model.get_input_embeddings().weight)
        state["embed_tokens.weight"] = weight.detach().float().cpu()
        notes.append("embed_tokens.weight: taken from the target")
    state["d2t"], state["t2d"] = state["d2t"].long(), state["t2d"].bool()
