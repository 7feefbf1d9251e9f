"""Every way in which a head's folder contradicts itself or a target, by the field's name.

Loading refuses at the first one; a person who has to repair a head wants all of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.drafter.head.config import HeadConfig, HeadFormatError, rope_theta
from engine.drafter.head.file_names import WEIGHTS
from engine.drafter.head.files import FROM_TARGET, read_card, read_config
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.tap import default_captured_layers
from engine.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Mismatch:
    """is_fatal: the head is refused; otherwise it loads, and probably drafts badly."""

    field: str
    reason: str
    is_fatal: bool = True


def mismatches(folder: Path, target: LoadedModel | None) -> list[Mismatch]:
    """Empty for a head that fits; without a target, only what the folder itself says."""
    try:
        config = read_config(folder)
    except HeadFormatError as error:
        return [Mismatch("config.json", str(error))]
    try:
        card = read_card(folder)
    except HeadFormatError as error:
        return [Mismatch("drafter_card.json", str(error))]
    found = _of_tensors(folder, config, is_slim=bool(card.get("is_slim")))
    if target is not None:
        found += _of_target(config, card, target)
    return found


def _of_tensors(folder: Path, config: HeadConfig, *, is_slim: bool) -> list[Mismatch]:
    with torch.device("meta"):
        expected = {
            name: tuple(tensor.shape) for name, tensor in Eagle3Head(config).state_dict().items()
        }
    optional = set(FROM_TARGET) if is_slim else {"t2d", "embed_tokens.weight"}
    if config.draft_vocab_size == config.vocab_size:
        optional.add("d2t")
    found = []
    try:
        with safe_open(folder / WEIGHTS, "pt") as weights:
            names = set(weights.keys())
            for name in sorted(expected.keys() - names - optional):
                found.append(Mismatch(name, "is missing"))
            for name in sorted(names - expected.keys()):
                found.append(Mismatch(name, "is not known"))
            for name in sorted(names & expected.keys()):
                shape = tuple(weights.get_slice(name).get_shape())
                if shape != expected[name]:
                    reason = f"is {list(shape)}, config.json says {list(expected[name])}"
                    found.append(Mismatch(name, reason))
                elif name in ("d2t", "t2d"):
                    continue
                elif not torch.isfinite(weights.get_tensor(name)).all():
                    found.append(Mismatch(name, "is not finite"))
            if "d2t" in names and tuple(weights.get_slice("d2t").get_shape()) == expected["d2t"]:
                t2d = weights.get_tensor("t2d") if "t2d" in names else None
                found += _of_vocabulary(config, weights.get_tensor("d2t"), t2d)
    except (OSError, SafetensorError) as error:
        found.append(Mismatch(WEIGHTS, str(error)))
    return found


def _of_vocabulary(
    config: HeadConfig, d2t: torch.Tensor, t2d: torch.Tensor | None
) -> list[Mismatch]:
    token_ids = torch.arange(len(d2t)) + d2t
    if bool(((token_ids < 0) | (token_ids >= config.vocab_size)).any()):
        return [Mismatch("d2t", "points outside the vocabulary")]
    if len(set(token_ids.tolist())) != len(token_ids):
        return [Mismatch("d2t", "names a token twice")]
    if t2d is not None and t2d.nonzero().flatten().tolist() != sorted(token_ids.tolist()):
        return [Mismatch("t2d", "describes another vocabulary than d2t")]
    return []


def _of_target(config: HeadConfig, card: Mapping[str, Any], target: LoadedModel) -> list[Mismatch]:
    text = target.model.config.get_text_config()
    found = [
        Mismatch(field, f"the head's is {ours}, the target's {theirs}")
        for field, ours, theirs in (
            ("hidden_size", config.hidden_size, text.hidden_size),
            ("vocab_size", config.vocab_size, text.vocab_size),
        )
        if ours != theirs
    ]
    made_for = card.get("target_fingerprint")
    if made_for and made_for != target.fingerprint:
        found.append(
            Mismatch("target_fingerprint", f"made for {made_for}, this is {target.fingerprint}")
        )
    if max(config.captured_layers) >= text.num_hidden_layers:
        reason = f"{list(config.captured_layers)} of {text.num_hidden_layers} layers"
        found.append(Mismatch("eagle_aux_hidden_state_layer_ids", reason))
    elif config.captured_layers != default_captured_layers(text.num_hidden_layers):
        usual = list(default_captured_layers(text.num_hidden_layers))
        reason = f"{list(config.captured_layers)} are not the usual {usual}"
        found.append(Mismatch("eagle_aux_hidden_state_layer_ids", reason, is_fatal=False))
    architecture = type(target.model).__name__
    if config.target_architecture != architecture:
        reason = f"made for {config.target_architecture}, this is {architecture}"
        found.append(Mismatch("verifier.architectures", reason, is_fatal=False))
    found += _of_positions(config, json.loads(text.to_json_string(use_diff=False)))
    return found


def _of_positions(config: HeadConfig, text: Mapping[str, Any]) -> list[Mismatch]:
    found = []
    try:
        theirs = rope_theta(text)
    except HeadFormatError:
        theirs = config.rope_theta  # the target scales its positions: nothing to compare
    if theirs != config.rope_theta:
        reason = f"the head's is {config.rope_theta:g}, the target's {theirs:g}"
        found.append(Mismatch("rope_theta", reason, is_fatal=False))
    context = text.get("max_position_embeddings")
    if isinstance(context, int) and config.max_positions < context:
        reason = f"{config.max_positions} of the target's {context}"
        found.append(Mismatch("max_position_embeddings", reason, is_fatal=False))
    return found
