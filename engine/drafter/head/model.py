"""The head's mathematics, shared by training and serving.

Position t of a sequence takes the embedding of token t + 1 and the fused hidden states of
token t, and predicts token t + 2 (Li et al. 2025, EAGLE-3, arXiv 2503.01840):

    f_t = W_fc . norm(h_t)                        three hidden states of the target, fused
    a_t = [norm_e(e(x_t+1)) ; norm_h(f_t)]        what attention reads
    u_t = r_t + W_o . attention(a)                r_t = f_t, or norm_h(f_t)
    s_t = u_t + mlp(norm_p(u_t))
    draft logits = W_lm . norm(s_t)               over the draft vocabulary

A further draft step takes s_t (or norm(s_t)) in the place of f and the token just drafted.
How keys are kept is the caller's: it hands in `attend`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.drafter.head.config import NUM_CAPTURED_LAYERS, HeadConfig

# (query [..., T, num_heads, D], key and value [..., T, num_kv_heads, D]) -> [..., T, num_heads, D]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(values.dtype)


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_heads * config.head_size, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_size, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_size, config.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(F.silu(self.gate_proj(values)) * self.up_proj(values))
        return down


class _Layer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        embeddings: torch.Tensor,  # [..., T, H]
        states: torch.Tensor,  # [..., T, H]
        rotation: tuple[torch.Tensor, torch.Tensor],  # cos, sin [..., T, 1, D]
        attend: Attend,
    ) -> torch.Tensor:
        config, attention = self.config, self.self_attn
        normed = self.hidden_norm(states)
        read = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        query = attention.q_proj(read).unflatten(-1, (config.num_heads, config.head_size))
        key, value = self._keys(read, rotation)
        attended = attend(rotate(query, rotation), key, value)
        residual = normed if config.norm_before_residual else states
        states = residual + attention.o_proj(attended.flatten(-2))
        output: torch.Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return output

    def keys(
        self,
        embeddings: torch.Tensor,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [..., T, num_kv_heads, D] alone, for positions that predict nothing."""
        read = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)
        return self._keys(read, rotation)

    def _keys(
        self, read: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.config.num_kv_heads, self.config.head_size)
        key = self.self_attn.k_proj(read).unflatten(-1, shape)
        value: torch.Tensor = self.self_attn.v_proj(read).unflatten(-1, shape)
        return rotate(key, rotation), value


def rotate(
    values: torch.Tensor,  # [..., T, num_heads, D]
    rotation: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Rotary position embedding over halves, as Llama's (Su et al. 2021)."""
    cos, sin = rotation
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat([-second, first], dim=-1) * sin


class Eagle3Head(nn.Module):
    """The weights of a head, named as in the `speculators` format.

    embed_tokens belongs to the target. d2t [Vd]: token id of draft token j is j + d2t[j];
    t2d [V]: whether the draft vocabulary has a token.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    _inverse_frequencies: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size, captured = config.hidden_size, NUM_CAPTURED_LAYERS
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.requires_grad_(False)
        self.fc = nn.Linear(captured * size, size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(captured * size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(size, config.rms_norm_eps) for _ in range(captured)
            )
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
        self.register_buffer(
            "_inverse_frequencies", 1.0 / config.rope_theta**exponents, persistent=False
        )

    @property
    def _layer(self) -> _Layer:
        layer = self.layers[0]
        assert isinstance(layer, _Layer)  # noqa: S101 - for the type checker
        return layer

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def draft_token_ids(self) -> torch.Tensor:
        """[Vd] the target's token id of each draft token."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, token_ids: torch.Tensor) -> None:
        """token_ids [Vd]: the target's tokens that can be drafted, in ascending order."""
        if len(token_ids) != len(self.d2t) or bool((token_ids.diff() <= 0).any()):
            raise ValueError("token_ids: must be draft_vocab_size different ids in order")
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
        self.t2d.zero_()
        self.t2d[token_ids] = True

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """[..., H] from the three captured states [..., 3H] side by side."""
        if self.config.norm_before_fc:
            captured = self.input_norm(captured)
        if self.config.fc_norm:
            parts = captured.chunk(NUM_CAPTURED_LAYERS, dim=-1)
            captured = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        fused: torch.Tensor = self.fc(captured)
        return fused

    def rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [..., 1, D] of positions [...]."""
        angles = positions[..., None].float() * self._inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1).unsqueeze(-2)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def advance(
        self,
        token_ids: torch.Tensor,  # [..., T]
        states: torch.Tensor,  # [..., T, H]
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the output layer reads, what the next step takes), each [..., T, H]."""
        embeddings = self.embed_tokens(token_ids).to(states.dtype)
        states = self._layer(embeddings, states, rotation, attend)
        normed = self.norm(states)
        return normed, normed if self.config.norm_output else states

    def keys(
        self,
        token_ids: torch.Tensor,  # [..., T]
        states: torch.Tensor,  # [..., T, H]
        rotation: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value [..., T, num_kv_heads, D] of positions whose prediction is not wanted."""
        embeddings = self.embed_tokens(token_ids).to(states.dtype)
        return self._layer.keys(embeddings, states, rotation)
