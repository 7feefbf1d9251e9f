"""Every way in which a head's folder contradicts itself or a target, by the field's name.

Loading refuses at the first one; a person who has to repair a head wants all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.file_names import WEIGHTS
from engine.drafter.head.files import (
    FROM_TARGET,
    read_card,
    read_config,
    wrong_with,
    wrong_with_vocabulary,
)
from engine.drafter.head.likeness import PROBED, differences
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
        expected = Eagle3Head(config).state_dict()
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
                if reason := wrong_with(name, weights.get_tensor(name), expected[name]):
                    found.append(Mismatch(name, reason))
            if "d2t" in names - {mismatch.field for mismatch in found}:
                t2d = weights.get_tensor("t2d") if "t2d" in names else None
                d2t = weights.get_tensor("d2t")
                if wrong := wrong_with_vocabulary(d2t, t2d, config.vocab_size):
                    found.append(Mismatch(*wrong))
    except (OSError, SafetensorError) as error:
        found.append(Mismatch(WEIGHTS, str(error)))
    return found


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
    unlike = differences(config, target.model)
    found += [Mismatch(*difference, is_fatal=PROBED not in card) for difference in unlike]
    is_output_ids = "eagle_aux_hidden_state_layer_ids" in dict(unlike)
    made_for = card.get("target_fingerprint")
    if made_for and made_for != target.fingerprint:
        found.append(
            Mismatch("target_fingerprint", f"made for {made_for}, this is {target.fingerprint}")
        )
    if max(config.captured_layers) >= text.num_hidden_layers:
        reason = f"{list(config.captured_layers)} of {text.num_hidden_layers} layers"
        found.append(Mismatch("eagle_aux_hidden_state_layer_ids", reason))
    elif not is_output_ids and config.captured_layers != default_captured_layers(
        text.num_hidden_layers
    ):
        usual = list(default_captured_layers(text.num_hidden_layers))
        reason = f"{list(config.captured_layers)} are not the usual {usual}"
        found.append(Mismatch("eagle_aux_hidden_state_layer_ids", reason, is_fatal=False))
    architecture = type(target.model).__name__
    if config.target_architecture != architecture:
        reason = f"made for {config.target_architecture}, this is {architecture}"
        found.append(Mismatch("verifier.architectures", reason, is_fatal=False))
    context = getattr(text, "max_position_embeddings", None)
    if isinstance(context, int) and config.max_positions < context:
        reason = f"{config.max_positions} of the target's {context}"
        found.append(Mismatch("max_position_embeddings", reason, is_fatal=False))
    return found
