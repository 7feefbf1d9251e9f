"""Reads and writes heads: a `speculators` directory, whole and checked, or our slim one.

A slim head leaves out what belongs to the target (its embedding, its output rows of the
draft vocabulary) and is completed when it is loaded beside its target. Nothing is ever
guessed: a missing or unknown tensor, a vocabulary map that contradicts itself, or a card of
another target is refused with its name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.file_names import CARD, CONFIG, WEIGHTS
from engine.drafter.head.likeness import check_likeness
from engine.drafter.head.model import Eagle3Head
from engine.loader import embedding_weight, output_weight

_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FROM_TARGET = ("embed_tokens.weight", "lm_head.weight", "t2d")


def is_head_folder(folder: Path) -> bool:
    """Whether a folder says that it holds a head."""
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "speculators_model_type" in content


def save_head(
    folder: Path,
    head: Eagle3Head,
    card: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
    is_slim: bool = False,
) -> None:
    """Write config, weights and card into an existing folder."""
    state = {}
    for name, tensor in head.state_dict().items():
        if is_slim and name in FROM_TARGET:
            continue
        kept = tensor.to(dtype) if tensor.is_floating_point() else tensor
        state[name] = kept.contiguous().cpu()
    content = head.config.to_json() | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    (folder / WEIGHTS).write_bytes(save(state, {"format": "pt"}))
    (folder / CARD).write_text(json.dumps({**card, "is_slim": is_slim}, indent=2) + "\n")


def read_card(folder: Path) -> dict[str, Any]:
    """What is known of a head's making; empty for heads that others made."""
    path = folder / CARD
    if not path.exists():
        return {}
    try:
        card = json.loads(path.read_text())
    except ValueError as error:
        raise HeadFormatError(f"{path}: {error}") from error
    if not isinstance(card, dict):
        raise HeadFormatError(f"{path}: must be an object")
    return card


def read_config(folder: Path) -> HeadConfig:
    """Raises HeadFormatError naming what is wrong."""
    path = folder / CONFIG
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HeadFormatError(f"{path}: {error}") from error
    try:
        return HeadConfig.from_json(content)
    except HeadFormatError as error:
        raise HeadFormatError(f"{path}: {error}") from error


def load_head(
    folder: Path,
    target: PreTrainedModel | None,
    *,
    target_fingerprint: str | None = None,
    ignores_fingerprint: bool = False,
    is_to_be_probed: bool = False,
) -> Eagle3Head:
    """The head of a folder, in float32. A slim one needs its target.

    target_fingerprint is compared with the card's, if the card has one. is_to_be_probed: what
    differs from the target without having been measured is no reason to refuse. Raises
    HeadFormatError naming the field or tensor.
    """
    config = read_config(folder)
    card = read_card(folder)
    made_for = card.get("target_fingerprint")
    if made_for and target_fingerprint and made_for != target_fingerprint:
        message = f"{folder}: target_fingerprint: made for {made_for}, the target is "
        if not ignores_fingerprint:
            raise HeadFormatError(f"{message}{target_fingerprint}")
    if target is not None:
        check_fits(config, target)
        if not is_to_be_probed:
            check_likeness(config, card, target)
    path = folder / WEIGHTS
    if not path.exists():
        raise HeadFormatError(f"{path}: is missing; only safetensors are read")
    state = load_file(path)
    head = Eagle3Head(config)
    _complete(state, head, target, folder)
    expected = head.state_dict()
    missing, unknown = expected.keys() - state.keys(), state.keys() - expected.keys()
    if missing or unknown:
        raise HeadFormatError(
            f"{path}: missing tensors {sorted(missing)}, unknown tensors {sorted(unknown)}"
        )
    for name, tensor in state.items():
        if reason := wrong_with(name, tensor, expected[name]):
            raise HeadFormatError(f"{path}: {name}: {reason}")
    if found := wrong_with_vocabulary(state["d2t"], state["t2d"], config.vocab_size):
        raise HeadFormatError(f"{path}: {found[0]}: {found[1]}")
    head.load_state_dict(state)
    return head.eval().requires_grad_(False)


def wrong_with(name: str, tensor: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Why a file's tensor cannot be the one that the configuration expects, or None."""
    if tensor.shape != expected.shape:
        return f"is {list(tensor.shape)}, config.json says {list(expected.shape)}"
    if expected.is_floating_point():
        if tensor.dtype not in _WEIGHT_DTYPES:
            kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in _WEIGHT_DTYPES)
            return f"is {tensor.dtype}, only {kinds} are read"
        if not torch.isfinite(tensor).all():
            return "is not finite"
        if name == "embed_tokens.weight" and not tensor.any():
            return "is all zero, which some programs write in the place of the target's"
    elif tensor.is_floating_point():
        return f"is {tensor.dtype}, not whole numbers"
    return None


def check_fits(config: HeadConfig, target: PreTrainedModel) -> None:
    """Raise HeadFormatError naming the field in which a head and a target disagree."""
    text = target.config.get_text_config()
    for field, ours, theirs in (
        ("hidden_size", config.hidden_size, text.hidden_size),
        ("vocab_size", config.vocab_size, text.vocab_size),
    ):
        if ours != theirs:
            raise HeadFormatError(f"{field}: the head's is {ours}, the target's {theirs}")
    if max(config.captured_layers) >= text.num_hidden_layers:
        raise HeadFormatError(
            f"eagle_aux_hidden_state_layer_ids: {list(config.captured_layers)} reach beyond the "
            f"target's {text.num_hidden_layers} layers"
        )


def _complete(
    state: dict[str, torch.Tensor], head: Eagle3Head, target: PreTrainedModel | None, folder: Path
) -> None:
    """Add what follows from the target, and the maps of a vocabulary that is not reduced."""
    config = head.config
    if config.draft_vocab_size == config.vocab_size and "d2t" not in state:
        state["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "d2t" not in state:
        raise HeadFormatError(f"{folder}: d2t is missing and draft_vocab_size is reduced")
    token_ids = torch.arange(len(state["d2t"])) + state["d2t"]
    if bool(((token_ids < 0) | (token_ids >= config.vocab_size)).any()):
        raise HeadFormatError(f"{folder}: d2t points outside the vocabulary")
    if "t2d" not in state:
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        state["t2d"][token_ids] = True
    if "embed_tokens.weight" not in state and target is not None:
        state["embed_tokens.weight"] = embedding_weight(target).float().cpu()
    if "lm_head.weight" not in state and target is not None and read_card(folder).get("is_slim"):
        weight = output_weight(target)
        state["lm_head.weight"] = weight[token_ids.to(weight.device)].float().cpu()


def wrong_with_vocabulary(
    d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int
) -> tuple[str, str] | None:
    """(field, reason) for maps that contradict themselves or each other, or None. d2t [Vd] and,
    if it is there, t2d [V] as Eagle3Head has them."""
    token_ids = torch.arange(len(d2t)) + d2t.long()
    if bool(((token_ids < 0) | (token_ids >= vocab_size)).any()):
        return "d2t", "points outside the vocabulary"
    if len(set(token_ids.tolist())) != len(token_ids):
        return "d2t", "names a token twice"
    if t2d is not None and t2d.nonzero().flatten().tolist() != token_ids.sort().values.tolist():
        return "t2d", "describes another vocabulary than d2t"
    return None
