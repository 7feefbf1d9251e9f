"""What made heads of other programs draft badly without a word is refused by its field's name.

Each case was somebody's: layer ids of another convention or named twice, a rotary base or an
epsilon that is not the target's, a norm left out or added, a vocabulary map lost, broken or of
other tokens, another algorithm, tensors of another kind, an embedding that was never loaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.file_names import CARD, CONFIG, WEIGHTS
from engine.drafter.head.files import load_head, save_head
from engine.drafter.head.inspection import mismatches
from engine.loader import LoadedModel
from tests.engine.heads import NUM_LAYERS, config_for, random_head, tiny_target

Content = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[Content, Tensors], object]
_LAYER = "transformer_layer_config"
_IDS = "eagle_aux_hidden_state_layer_ids"


def _theta(content: Content, *, flat: float, nested: float) -> None:
    content[_LAYER]["rope_theta"] = flat
    content[_LAYER]["rope_parameters"] = {"rope_type": "default", "rope_theta": nested}


def _dequantized(name: str, dtype: torch.dtype) -> Change:
    return lambda content, state: state.update({name: state[name].to(dtype)})


OUTPUT_IDS = [1, NUM_LAYERS // 2 - 1, NUM_LAYERS - 4]
CASES: dict[str, tuple[Change, str]] = {
    "ids of outputs": (lambda c, s: c.update({_IDS: OUTPUT_IDS}), _IDS),
    "ids past the last layer": (lambda c, s: c.update({_IDS: [2, 4, NUM_LAYERS]}), _IDS),
    "four ids": (lambda c, s: c.update({_IDS: [2, 4, 5, 6]}), _IDS),
    "an id twice": (lambda c, s: c.update({_IDS: [2, 2, 5]}), _IDS),
    "ids that are no numbers": (lambda c, s: c.update({_IDS: [2, 4, "5"]}), _IDS),
    "no ids": (lambda c, s: c.pop(_IDS), _IDS),
    "base that is not the target's": (lambda c, s: _theta(c, flat=77.0, nested=77.0), "rope_theta"),
    "two bases": (lambda c, s: _theta(c, flat=77.0, nested=10000.0), "rope_theta"),
    "scaled positions": (
        lambda c, s: c[_LAYER].update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "rope_type",
    ),
    "half rotated": (
        lambda c, s: c[_LAYER].update(partial_rotary_factor=0.5),
        "partial_rotary_factor",
    ),
    "epsilon": (lambda c, s: c[_LAYER].update(rms_norm_eps=1e-3), "rms_norm_eps"),
    "no epsilon": (lambda c, s: c[_LAYER].pop("rms_norm_eps"), "rms_norm_eps"),
    "a norm that the flags deny": (lambda c, s: c.update(norm_before_fc=False), "input_norm"),
    "a norm that is not there": (lambda c, s: s.pop("input_norm.weight"), "input_norm"),
    "both kinds of norms": (lambda c, s: c.update(fc_norm=True), "fc_norm"),
    "a norm of a later version": (lambda c, s: c.update(norm_embeddings=True), "norm_embeddings"),
    "no flag of the residual": (lambda c, s: c.pop("norm_before_residual"), "norm_before_residual"),
    "no flag of the output": (lambda c, s: c.pop("norm_output"), "norm_output"),
    "no size of heads": (lambda c, s: c[_LAYER].pop("head_dim"), "head_dim"),
    "size of heads": (lambda c, s: c[_LAYER].update(head_dim=6), "self_attn"),
    "key heads": (lambda c, s: c[_LAYER].update(num_key_value_heads=1), "self_attn"),
    "a wider target": (lambda c, s: c.update(target_hidden_size=64), "target_hidden_size"),
    "another tokenizer": (lambda c, s: c[_LAYER].update(vocab_size=999), "vocab_size"),
    "two layers": (lambda c, s: c[_LAYER].update(num_hidden_layers=2), "num_hidden_layers"),
    "activation": (lambda c, s: c[_LAYER].update(hidden_act="relu"), "hidden_act"),
    "biases": (lambda c, s: c[_LAYER].update(attention_bias=True), "attention_bias"),
    "another model": (lambda c, s: c[_LAYER].update(model_type="gpt2"), "model_type"),
    "another algorithm": (
        lambda c, s: c["speculators_config"].update(algorithm="eagle"),
        "speculators_config.algorithm",
    ),
    "another type": (lambda c, s: c.update(speculators_model_type="eagle"), "speculators_model"),
    "quantized": (lambda c, s: c.update(quantization_config={"bits": 4}), "quantization_config"),
    "no map": (lambda c, s: s.pop("d2t"), "d2t"),
    "a map past the vocabulary": (lambda c, s: s["d2t"].fill_(9999), "d2t"),
    "a token twice": (lambda c, s: s["d2t"][1:].sub_(1), "d2t"),
    "maps that differ": (lambda c, s: s["t2d"].fill_(True), "t2d"),
    "a map of fractions": (_dequantized("d2t", torch.float32), "d2t"),
    "a map of another size": (lambda c, s: c.update(draft_vocab_size=199), "d2t"),
    "tied output rows": (
        lambda c, s: (c.update(tie_word_embeddings=True), s.pop("lm_head.weight")),
        "lm_head.weight",
    ),
    "weights in whole numbers": (_dequantized("fc.weight", torch.int8), "fc.weight"),
    "weights in eight bits": (_dequantized("fc.weight", torch.float8_e4m3fn), "fc.weight"),
    "weights never set": (lambda c, s: s["fc.weight"].fill_(float("nan")), "fc.weight"),
    "embedding never loaded": (
        lambda c, s: s["embed_tokens.weight"].zero_(),
        "embed_tokens.weight",
    ),
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


def _saved(folder: Path, target: LoadedModel, change: Change | None, **card: Any) -> Path:
    head = random_head(target, config_for(target, 200), list(range(3, 203)))
    folder.mkdir()
    save_head(folder, head, card, dtype=torch.float32)
    if change is not None:
        content = json.loads((folder / CONFIG).read_text())
        state = load_file(folder / WEIGHTS)
        change(content, state)
        (folder / CONFIG).write_text(json.dumps(content))
        save_file(state, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(target: LoadedModel, tmp_path: Path, case: str) -> None:
    change, field = CASES[case]
    folder = _saved(tmp_path / "head", target, change)
    with pytest.raises(HeadFormatError, match=field):
        load_head(folder, target.model, target_fingerprint=target.fingerprint)
    fatal = [m for m in mismatches(folder, target) if m.is_fatal]
    assert any(field in f"{m.field}: {m.reason}" for m in fatal), "inspection lists it, too"


def test_a_head_of_another_target_is_refused_whatever_it_was_called(
    target: LoadedModel, tmp_path: Path
) -> None:
    """Fingerprints see the weights, the tokenizer and the chat template."""
    folder = _saved(tmp_path / "head", target, None, target_fingerprint="another")
    with pytest.raises(HeadFormatError, match="target_fingerprint"):
        load_head(folder, target.model, target_fingerprint=target.fingerprint)


@pytest.mark.parametrize("case", ["ids of outputs", "base that is not the target's", "epsilon"])
def test_what_no_file_can_tell_is_served_once_it_was_measured(
    target: LoadedModel, tmp_path: Path, case: str
) -> None:
    change, field = CASES[case]
    folder = _saved(tmp_path / "head", target, change)
    load_head(folder, target.model, is_to_be_probed=True)
    card = json.loads((folder / CARD).read_text()) | {"probed": {}}
    (folder / CARD).write_text(json.dumps(card))
    load_head(folder, target.model)
    assert [m.field for m in mismatches(folder, target) if not m.is_fatal] == [field]
