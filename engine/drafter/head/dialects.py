"""Heads as other programs write them, translated to ours: names of tensors, flags, layer ids.

| dialect      | recognised by                                  | translated                       |
|--------------|------------------------------------------------|----------------------------------|
| speculators  | speculators_model_type                         | flags left out get its defaults  |
| nemo         | LlamaEagle3DraftModel, tensors `model.*`       | prefix; selected_token_ids: d2t  |
| nvidia       | nested eagle_config with flags                 | as eagle, flags from there       |
| eagle        | LlamaForCausalLMEagle3, tensors `midlayer.*`   | names; ids of outputs get + 1    |

(SafeAILab/EAGLE, SpecForge and AngelSlim write the dialect eagle.) A tensor that is there
overrides a flag that says otherwise. Every choice that the source left open is reported as a
note; whether it was the right one, `tandem drafter probe` measures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.drafter.head.config import HeadConfig, HeadFormatError, rope_theta
from engine.drafter.head.tap import default_captured_layers

DIALECTS = ("speculators", "nemo", "nvidia", "eagle")
_TO_OURS = (
    ("midlayer.", "layers.0."),
    ("layers.0.fc_norm.", "fc_norm."),
)
_FLAG_OF_TENSOR = (("input_norm.weight", "norm_before_fc"), ("fc_norm.0.weight", "fc_norm"))


def recognize(content: Mapping[str, Any], tensor_names: set[str]) -> str:
    """The dialect of a config.json and its tensors. Raises HeadFormatError."""
    architectures = content.get("architectures") or []
    if "speculators_model_type" in content:
        return "speculators"
    if "LlamaEagle3DraftModel" in architectures:
        return "nemo"
    if "LlamaForCausalLMEagle3" in architectures or any(
        name.startswith("midlayer.") for name in tensor_names
    ):
        nested = content.get("eagle_config") or {}
        return "nvidia" if "norm_before_fc" in nested or "eagle_version" in nested else "eagle"
    raise HeadFormatError(
        f"architectures: {architectures!r} is none of the heads that can be imported: {DIALECTS}"
    )


def our_tensors(
    dialect: str, state: Mapping[str, torch.Tensor], folder: Path, notes: list[str]
) -> dict[str, torch.Tensor]:
    """The tensors by our names."""
    prefix = "model." if dialect == "nemo" else ""
    found = {_our_name(name.removeprefix(prefix)): tensor for name, tensor in state.items()}
    if dialect == "nemo":
        _add_selected_tokens(found, folder, notes)
    return found


def our_config(
    dialect: str,
    content: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    num_layers: int,
    notes: list[str],
    *,
    undo_rope_scaling: bool,
    num_draft_tokens: int,
) -> HeadConfig:
    """The configuration, read beside our_tensors. num_layers: of the target."""
    if dialect == "speculators":
        return _of_speculators(content, state, notes)
    return _of_flat(content, state, num_layers, notes, undo_rope_scaling, num_draft_tokens)


def _our_name(name: str) -> str:
    for theirs, ours in _TO_OURS:
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _add_selected_tokens(state: dict[str, torch.Tensor], folder: Path, notes: list[str]) -> None:
    """NeMo keeps the draft vocabulary beside the weights, or in the folder above them."""
    selected = state.pop("selected_token_ids", None)
    state.pop("selected_token_mask", None)
    if "d2t" in state:
        return
    for path in (folder / "eagle_meta.pt", folder.parent / "eagle_meta.pt"):
        if selected is None and path.is_file():
            meta = torch.load(path, map_location="cpu", weights_only=True)
            selected = meta.get("selected_token_ids")
            notes.append(f"d2t: made from selected_token_ids of {path.name}")
    if selected is not None:
        state["d2t"] = selected.long() - torch.arange(len(selected))


_SPECULATORS_DEFAULTS = {
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}


def _of_speculators(
    content: Mapping[str, Any], state: Mapping[str, torch.Tensor], notes: list[str]
) -> HeadConfig:
    complete = dict(content)
    for name, default in _SPECULATORS_DEFAULTS.items():
        if complete.get(name) is None:
            complete[name] = default
            notes.append(f"{name}: not stated, {default} as in the speculators package")
    layer = complete.get("transformer_layer_config")
    if isinstance(layer, dict) and layer.get("head_dim") is None:
        size, heads = (_number(layer, name) for name in ("hidden_size", "num_attention_heads"))
        complete["transformer_layer_config"] = layer | {"head_dim": size // heads}
        notes.append(f"head_dim: not stated, {size // heads} by the heads")
    _follow_tensors(complete, state, notes)
    return HeadConfig.from_json(complete)


def _of_flat(
    content: Mapping[str, Any],
    state: Mapping[str, torch.Tensor],
    num_layers: int,
    notes: list[str],
    undo_rope_scaling: bool,
    num_draft_tokens: int,
) -> HeadConfig:
    nested = content.get("eagle_config") or {}
    for name, supported in (("num_hidden_layers", 1), ("hidden_act", "silu")):
        if content.get(name, supported) != supported:
            raise HeadFormatError(f"{name}: {content[name]!r} is not supported, only {supported!r}")
    flags = {
        name: nested.get(name, content.get(name))
        for name in ("norm_before_fc", "fc_norm", "norm_before_residual")
    }
    # SpecForge's norm_output says that there is a norm before the output layer, which we always
    # have; only beside fc_norm does it mean what ours means.
    has_fc_norm = "fc_norm.0.weight" in state
    flags["norm_output"] = nested.get("norm_output", content.get("norm_output") and has_fc_norm)
    for name, value in flags.items():
        if value is None:
            notes.append(f"{name}: not stated, False as in EAGLE-3")
            flags[name] = False
    _follow_tensors(flags, state, notes)
    size, heads = _number(content, "hidden_size"), _number(content, "num_attention_heads")
    vocab_size = _number(content, "vocab_size")
    return HeadConfig(
        vocab_size=vocab_size,
        draft_vocab_size=int(content.get("draft_vocab_size") or vocab_size),
        hidden_size=size,
        intermediate_size=_number(content, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=int(_stated(content, "num_key_value_heads", heads, notes)),
        head_size=int(_stated(content, "head_dim", size // heads, notes)),
        rms_norm_eps=float(_stated(content, "rms_norm_eps", 1e-6, notes)),
        rope_theta=_theta(content, notes, undo_rope_scaling),
        max_positions=int(_stated(content, "max_position_embeddings", 2048, notes)),
        captured_layers=_layers(content, nested, num_layers, notes),
        norm_before_fc=bool(flags["norm_before_fc"]),
        fc_norm=bool(flags["fc_norm"]),
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_output=bool(flags["norm_output"]),
        num_draft_tokens=num_draft_tokens,
    )


def _stated(content: Mapping[str, Any], name: str, default: Any, notes: list[str]) -> Any:
    if content.get(name):
        return content[name]
    notes.append(f"{name}: not stated, {default} as Llama's")
    return default


def _theta(content: Mapping[str, Any], notes: list[str], undo_rope_scaling: bool) -> float:
    nested = content.get("rope_parameters") or content.get("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    base = content.get("rope_theta", nested.get("rope_theta"))
    if base is None:
        notes.append("rope_theta: not stated, 10000 as in EAGLE")
        base = 10000.0
    if kind != "default":
        if not undo_rope_scaling:
            raise HeadFormatError(
                f"rope_scaling: {kind!r} is not supported; heads are often trained without and "
                "scaled when exported, which can be undone on import"
            )
        notes.append(f"rope_scaling: {kind!r} undone")
        return float(base)
    return rope_theta({"rope_theta": base})


def _layers(
    content: Mapping[str, Any], nested: Mapping[str, Any], num_layers: int, notes: list[str]
) -> tuple[int, ...]:
    """In our convention, the input of a layer; some write the layers whose output is meant."""
    name = "eagle_aux_hidden_state_layer_ids"
    found = nested.get(name) or content.get(name)
    if not found:
        usual = default_captured_layers(num_layers)
        notes.append(f"{name}: not stated, {list(usual)} as in EAGLE-3")
        return usual
    if list(found) == [1, num_layers // 2 - 1, num_layers - 4]:
        shifted = tuple(layer + 1 for layer in found)
        notes.append(f"{name}: {list(found)} are outputs, the inputs are {list(shifted)}")
        return shifted
    return tuple(int(layer) for layer in found)


def _follow_tensors(
    flags: dict[str, Any], state: Mapping[str, torch.Tensor], notes: list[str]
) -> None:
    """A norm that is there was trained and is used; one that is not there cannot be."""
    for tensor, flag in _FLAG_OF_TENSOR:
        is_there = tensor in state
        if bool(flags.get(flag)) != is_there:
            notes.append(
                f"{flag}: {is_there}, because {tensor} is {'' if is_there else 'not '}there"
            )
            flags[flag] = is_there


def _number(content: Mapping[str, Any], name: str) -> int:
    value = content.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise HeadFormatError(f"{name}: must be a positive whole number, is {value!r}")
    return value
