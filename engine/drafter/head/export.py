"""Heads for other programs. What a format cannot say is refused, and what was written is read
again and compared, because a server that skips an unknown key starts all the same."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save

from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.file_names import CONFIG, WEIGHTS
from engine.drafter.head.files import load_head, save_head
from engine.drafter.head.importing import import_head
from engine.drafter.head.model import Eagle3Head
from engine.loader import LoadedModel

Format = Literal["speculators", "eagle"]
FORMATS: tuple[Format, ...] = get_args(Format)


def export_head(
    head: Eagle3Head,
    card: Mapping[str, Any],
    out: Path,
    target: LoadedModel,
    to: Format,
    *,
    dtype: torch.dtype = torch.bfloat16,
    target_name: str | None = None,
) -> None:
    """Write a folder that must not exist yet; it appears once it has been read again.

    target_name: what the file calls the target, a hub id or a path on the machine that serves
    it. Raises HeadFormatError for a head that the format has no words for.
    """
    if out.exists():
        raise HeadFormatError(f"{out}: exists already")
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        if to == "speculators":
            _write_speculators(head, card, staged, dtype, target_name)
            again = load_head(staged, target.model, is_to_be_probed=True)
        else:
            _write_eagle(head, staged, dtype)
            again = import_head(staged, target).head
        _compare(head, again, dtype)
        staged.chmod(0o755)
        staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _write_speculators(
    head: Eagle3Head,
    card: Mapping[str, Any],
    folder: Path,
    dtype: torch.dtype,
    target_name: str | None,
) -> None:
    save_head(folder, head, card, dtype=dtype)
    if target_name is not None:
        path = folder / CONFIG
        content = json.loads(path.read_text())
        content["speculators_config"]["verifier"]["name_or_path"] = target_name
        path.write_text(json.dumps(content, indent=2) + "\n")


def _write_eagle(head: Eagle3Head, folder: Path, dtype: torch.dtype) -> None:
    """The flat configuration and `midlayer` names of SafeAILab/EAGLE and SGLang."""
    config = head.config
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if getattr(config, flag):
            raise HeadFormatError(f"{flag}: True cannot be said in the format 'eagle'")
    content = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.captured_layers),
        },
    }
    state = {}
    for name, tensor in head.state_dict().items():
        kept = tensor.to(dtype) if tensor.is_floating_point() else tensor
        named = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.") else name
        state[named] = kept.contiguous().cpu()
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
    (folder / WEIGHTS).write_bytes(save(state, {"format": "pt"}))


def _compare(head: Eagle3Head, again: Eagle3Head, dtype: torch.dtype) -> None:
    """Flags equal, tensors equal up to the written number format."""
    for field in (
        "captured_layers",
        "rope_theta",
        "norm_before_fc",
        "fc_norm",
        "norm_before_residual",
        "norm_output",
        "draft_vocab_size",
    ):
        ours, theirs = getattr(head.config, field), getattr(again.config, field)
        if ours != theirs:
            raise HeadFormatError(f"{field}: {ours} was written and {theirs} read again")
    found = again.state_dict()
    for name, tensor in head.state_dict().items():
        kept = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        other = found[name].float() if tensor.is_floating_point() else found[name]
        if not torch.equal(kept.cpu(), other.cpu()):
            raise HeadFormatError(f"{name}: another tensor was read than written")
