"""A fresh head for a target: the target's own embedding and output rows, the rest random."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.drafter.head.config import HeadConfig
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.tap import default_captured_layers
from engine.loader import embedding_weight, output_weight
from engine.training.errors import TrainingError

_STANDARD_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What can be chosen of a head; None takes what suits the target."""

    draft_vocab_size: int = 8192
    captured_layers: tuple[int, ...] | None = None
    intermediate_size: int | None = None
    num_draft_tokens: int = 4


def head_config(target: PreTrainedModel, name: str, shape: HeadShape) -> HeadConfig:
    """Raises TrainingError naming what the target's configuration does not offer."""
    text = target.config.get_text_config()
    theta = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    num_heads = text.num_attention_heads
    if text.hidden_size % num_heads:
        raise TrainingError("head: the target's hidden_size is no multiple of its heads")
    return HeadConfig(
        vocab_size=text.vocab_size,
        draft_vocab_size=min(shape.draft_vocab_size, text.vocab_size),
        hidden_size=text.hidden_size,
        intermediate_size=shape.intermediate_size
        or getattr(text, "intermediate_size", None)
        or 4 * text.hidden_size,
        num_heads=num_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-5)),
        rope_theta=float(theta or 10000.0),
        max_positions=text.max_position_embeddings,
        captured_layers=shape.captured_layers or default_captured_layers(text.num_hidden_layers),
        norm_before_fc=True,
        fc_norm=False,
        norm_before_residual=True,
        norm_output=True,
        num_draft_tokens=shape.num_draft_tokens,
        target_name=name,
        target_architecture=(target.config.architectures or ["LlamaForCausalLM"])[0],
    )


def fresh_head(
    config: HeadConfig, target: PreTrainedModel, vocabulary: Sequence[int], seed: int
) -> Eagle3Head:
    """Random weights from `seed`, the same on every device; embedding and output layer are the
    target's, and frozen. On the target's device."""
    token_ids = torch.tensor(list(vocabulary))
    head = Eagle3Head(config)
    head.set_vocabulary(token_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in head.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
        head.embed_tokens.weight.copy_(embedding_weight(target))
        rows = output_weight(target)
        head.lm_head.weight.copy_(rows[token_ids.to(rows.device)])
        last_norm = getattr(target.base_model, "norm", None)
        if last_norm is not None and last_norm.weight.shape == head.norm.weight.shape:
            head.norm.weight.copy_(last_norm.weight)
    head.lm_head.requires_grad_(False)
    return head.to(target.device)
