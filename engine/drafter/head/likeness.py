"""In what a head is usually like its target, and drafts badly without a word where it is not.

A head may have been trained otherwise: some were with a rotary base of 10,000 whatever the
target has. Nobody can see that in the files, so a difference is refused until `tandem drafter
probe --apply` has measured it, which the head's card then says.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from engine.drafter.head.config import HeadConfig, HeadFormatError, rope_theta
from engine.drafter.head.tap import default_captured_layers

PROBED = "probed"  # the card's word for what the probe measured
_REMEDY = "if it was trained so, tandem drafter probe --apply measures and notes it"


def differences(config: HeadConfig, target: PreTrainedModel) -> list[tuple[str, str]]:
    """(field, reason) of each."""
    model_config = target.config.get_text_config()
    text = json.loads(model_config.to_json_string(use_diff=False))
    found = []
    if (base := _base(text)) is not None and not _is_same(base, config.rope_theta):
        found.append(("rope_theta", f"the head's is {config.rope_theta:g}, the target's {base:g}"))
    eps = text.get("rms_norm_eps")
    if isinstance(eps, int | float) and not _is_same(eps, config.rms_norm_eps):
        reason = f"the head's is {config.rms_norm_eps:g}, the target's {eps:g}"
        found.append(("rms_norm_eps", reason))
    layers, num_layers = config.captured_layers, model_config.num_hidden_layers
    usual = default_captured_layers(num_layers)
    if layers == (1, num_layers // 2 - 1, num_layers - 4) and layers != usual:
        reason = f"{list(layers)} are how others write the layers whose input is {list(usual)}"
        found.append(("eagle_aux_hidden_state_layer_ids", reason))
    return found


def check_likeness(config: HeadConfig, card: Mapping[str, Any], target: PreTrainedModel) -> None:
    """Raise HeadFormatError naming the first difference that nobody measured."""
    if PROBED in card:
        return
    for field, reason in differences(config, target):
        raise HeadFormatError(f"{field}: {reason}; {_REMEDY}")


def _is_same(first: float, second: float) -> bool:
    """Whether they differ by no more than a file format rounds."""
    return math.isclose(first, second, rel_tol=1e-4)


def _base(text: Mapping[str, Any]) -> float | None:
    try:
        return rope_theta(text)
    except HeadFormatError:
        return None  # the target scales its positions: nothing to compare
