"""Decoder layers with fewer and larger operations, in place of transformers' own.

A decode step of a small model on a CPU spends half of its time between the products: calling
modules, casting, slicing. A lean layer computes the same function with one product for query,
key and value, one for gate and up, and a rotation of queries and keys together in three
operations. It is called as transformers calls its own layers, asks the same AttentionInterface
and takes the same cache, so nothing around it knows; engine/probe.py compares the model's logits
with those that it gave before.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from engine.int8_linear import Int8Linear
from engine.rotary_table import RotaryTable
from engine.shards import is_sharded

_KNOWN_LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)


class LeanLayer(nn.Module):
    """y = h + mlp(norm(h)), h = x + attention(norm(x)), as in Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, layer: Any) -> None:
        """Takes the layer's weights: the layer itself is of no use any more."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.head_size: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_size
        self.num_kv_heads = attention.k_proj.out_features // self.head_size
        self.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = attention.o_proj
        self.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
        self.down_proj = mlp.down_proj
        self.activation = mlp.act_fn
        self.attention_norm = _LeanNorm(layer.input_layernorm)
        self.mlp_norm = _LeanNorm(layer.post_attention_layernorm)
        self.query_norm = _LeanNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.key_norm = _LeanNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        window = getattr(attention, "sliding_window", None)
        if isinstance(layer, MistralDecoderLayer):
            window = attention.config.sliding_window
        self._asked: dict[str, Any] = {"scaling": attention.scaling, "sliding_window": window}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            delattr(attention, name)
        self.self_attn = attention  # what attention functions are told about: layer_idx, config

    def forward(
        self,
        hidden_states: torch.Tensor,  # [B, T, hidden_size]
        attention_mask: torch.Tensor | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """[B, T, hidden_size]. position_embeddings as RotaryTable gives them."""
        if position_embeddings is None:
            raise ValueError("a lean layer needs position_embeddings")
        batch, num_tokens, _size = hidden_states.shape
        joined = self.qkv_proj(self.attention_norm(hidden_states))
        heads = joined.view(batch, num_tokens, -1, self.head_size)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = heads[:, :, :num_rotated]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=2)
            rotated = torch.cat([self.query_norm(query), self.key_norm(key)], dim=2)
        cos, sin = position_embeddings
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_size // 2, -1), sin)
        key = rotated[:, :, self.num_heads :].transpose(1, 2)
        value = heads[:, :, num_rotated:].transpose(1, 2)
        held = cache if cache is not None else past_key_values
        if held is not None:
            key, value = held.update(key, value, self.self_attn.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.self_attn.config._attn_implementation]
        attended, _weights = attend(
            self.self_attn,
            rotated[:, :, : self.num_heads].transpose(1, 2),
            key,
            value,
            attention_mask,
            **self._asked,
        )
        hidden_states = hidden_states + self.o_proj(attended.reshape(batch, num_tokens, -1))
        gate, up = self.gate_up_proj(self.mlp_norm(hidden_states)).chunk(2, dim=-1)
        output: torch.Tensor = hidden_states + self.down_proj(self.activation(gate).mul_(up))
        return output


class _LeanNorm(nn.Module):
    """Root mean square normalisation over the last dimension, in one call."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight
        self._epsilon: float = norm.variance_epsilon
        self._shape = list(norm.weight.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight, self._epsilon)


def _joined(*linears: Any) -> nn.Linear | Int8Linear:
    """One layer whose outputs are those of `linears`, one after the other."""
    if all(isinstance(linear, Int8Linear) for linear in linears):
        return Int8Linear.joined(linears)
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


def can_be_lean(model: PreTrainedModel) -> bool:
    """Whether all of the model's layers are of a kind that LeanLayer computes."""
    inner = getattr(model, "model", None)
    layers: Any = getattr(inner, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers or is_sharded(model):
        return False
    rotary = getattr(inner, "rotary_emb", None)
    first: Any = layers[0]
    return (
        all(type(layer) in _KNOWN_LAYERS for layer in layers)
        and RotaryTable.can_hold(rotary, first.self_attn.head_dim)
        and all(_biases_agree(layer) for layer in layers)
    )


def _biases_agree(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    query = [attention.q_proj.bias is None, attention.k_proj.bias is None]
    return len({*query, attention.v_proj.bias is None}) == 1 and (mlp.gate_proj.bias is None) == (
        mlp.up_proj.bias is None
    )


@torch.inference_mode()
def make_lean(model: PreTrainedModel, num_positions: int) -> None:
    """Replace the model's layers in place. No sequence may have more than num_positions tokens.

    Needs `can_be_lean(model)`. Hooks on the layers that are replaced are lost.
    """
    inner: Any = model.model
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = LeanLayer(layer)
    inner.rotary_emb = RotaryTable(inner.rotary_emb, num_positions)
