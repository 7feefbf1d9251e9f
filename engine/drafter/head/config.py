"""What a head is: its sizes and flags, as written in a `speculators` directory's config.json.

Every flag is written and every flag is needed when read: each one that some program defaulted
differently made heads that draft badly and say nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ALGORITHM = "eagle3"
ARCHITECTURE = "Eagle3DraftModel"
FORMAT_VERSION = "0.9.0"
NUM_CAPTURED_LAYERS = 3


class HeadFormatError(ValueError):
    """A head that cannot be used as it is; the message names the field or tensor."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and flags of a head.

    captured_layers: indices of the target's layers whose *input* is captured.
    norm_before_fc: one norm over the three captured states before they are fused.
    fc_norm: a norm for each of them. norm_before_residual: the residual is the normed state.
    norm_output: the state handed to the next draft step is the one after the last norm.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    captured_layers: tuple[int, ...]
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool
    num_draft_tokens: int = 4
    target_name: str = ""
    target_architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        def require(condition: bool, field: str, reason: str) -> None:
            if not condition:
                raise HeadFormatError(f"{field}: {reason}")

        sizes = (
            "vocab_size",
            "draft_vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "max_positions",
            "num_draft_tokens",
        )
        for name in sizes:
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, name, f"must be positive, is {value!r}")
        require(
            self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            f"{self.draft_vocab_size} is more than vocab_size {self.vocab_size}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            "num_key_value_heads",
            f"{self.num_kv_heads} does not divide {self.num_heads} heads",
        )
        require(self.head_size % 2 == 0, "head_dim", "must be even")
        require(
            len(self.captured_layers) == NUM_CAPTURED_LAYERS,
            "eagle_aux_hidden_state_layer_ids",
            f"needs {NUM_CAPTURED_LAYERS} layers, has {list(self.captured_layers)}",
        )
        require(
            all(type(layer) is int and layer >= 0 for layer in self.captured_layers),
            "eagle_aux_hidden_state_layer_ids",
            f"must be whole numbers, none negative: {list(self.captured_layers)}",
        )
        require(
            len(set(self.captured_layers)) == NUM_CAPTURED_LAYERS,
            "eagle_aux_hidden_state_layer_ids",
            f"names a layer twice: {list(self.captured_layers)}",
        )
        require(0 < self.rms_norm_eps < 1, "rms_norm_eps", f"is {self.rms_norm_eps!r}")
        require(
            not (self.norm_before_fc and self.fc_norm),
            "fc_norm",
            "cannot be combined with norm_before_fc",
        )
        require(self.rope_theta > 0, "rope_theta", "must be positive")

    def to_json(self) -> dict[str, Any]:
        """The content of config.json, for `speculators` and for vLLM."""
        return {
            "architectures": [ARCHITECTURE],
            "speculators_model_type": ALGORITHM,
            "speculators_version": FORMAT_VERSION,
            "draft_vocab_size": self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
            "embed_requires_grad": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": list(self.captured_layers),
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
            "speculators_config": {
                "algorithm": ALGORITHM,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": self.num_draft_tokens,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {
                    "name_or_path": self.target_name or None,
                    "architectures": [self.target_architecture],
                },
            },
            "transformer_layer_config": {
                "model_type": "llama",
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": 1,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_size,
                "hidden_act": "silu",
                "rms_norm_eps": self.rms_norm_eps,
                "attention_bias": False,
                "mlp_bias": False,
                "max_position_embeddings": self.max_positions,
                "rope_theta": self.rope_theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
                "tie_word_embeddings": False,
            },
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "HeadConfig":
        """Raises HeadFormatError naming the field that is missing or not supported."""
        _expect(content, "speculators_model_type", ALGORITHM)
        layer = _get(content, "transformer_layer_config", dict)
        prefix = "transformer_layer_config."
        _expect(layer, "model_type", "llama", prefix)
        _expect(layer, "num_hidden_layers", 1, prefix)
        _expect(layer, "hidden_act", "silu", prefix)
        for name in ("attention_bias", "mlp_bias"):
            _expect(layer, name, False, prefix, default=False)
        _expect(layer, "partial_rotary_factor", 1.0, prefix, default=1.0)
        _expect(content, "quantization_config", None)
        _refuse_unknown_norms(content)
        hidden_size = _get(layer, "hidden_size", int, prefix)
        num_heads = _get(layer, "num_attention_heads", int, prefix)
        target_hidden_size = content.get("target_hidden_size")
        if target_hidden_size not in (None, hidden_size):
            raise HeadFormatError(
                f"target_hidden_size: {target_hidden_size} differs from hidden_size {hidden_size}, "
                "which is not supported"
            )
        speculation = _get(content, "speculators_config", dict)
        _expect(speculation, "algorithm", ALGORITHM, "speculators_config.")
        verifier = speculation.get("verifier") or {}
        architectures = verifier.get("architectures") or ["LlamaForCausalLM"]
        return cls(
            vocab_size=_get(layer, "vocab_size", int, prefix),
            draft_vocab_size=_get(content, "draft_vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_get(layer, "intermediate_size", int, prefix),
            num_heads=num_heads,
            num_kv_heads=_get(layer, "num_key_value_heads", int, prefix),
            head_size=_get(layer, "head_dim", int, prefix),
            rms_norm_eps=float(_get(layer, "rms_norm_eps", (int, float), prefix)),
            rope_theta=rope_theta(layer, prefix),
            max_positions=_get(layer, "max_position_embeddings", int, prefix),
            captured_layers=tuple(_get(content, "eagle_aux_hidden_state_layer_ids", list)),
            norm_before_fc=_get(content, "norm_before_fc", bool),
            fc_norm=_get(content, "fc_norm", bool),
            norm_before_residual=_get(content, "norm_before_residual", bool),
            norm_output=_get(content, "norm_output", bool),
            num_draft_tokens=_num_draft_tokens(speculation),
            target_name=str(verifier.get("name_or_path") or ""),
            target_architecture=str(architectures[0]),
        )


def rope_theta(layer: Mapping[str, Any], prefix: str = "") -> float:
    """The base of the rotary embedding; both spellings are read, and must agree."""
    nested = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = nested.get("rope_type", nested.get("type", "default"))
    _expect(nested, "partial_rotary_factor", 1.0, f"{prefix}rope_parameters.", default=1.0)
    if kind != "default":
        raise HeadFormatError(f"{prefix}rope_parameters.rope_type: {kind!r} is not supported")
    found = {float(v["rope_theta"]) for v in (layer, nested) if v.get("rope_theta") is not None}
    if len(found) != 1:
        raise HeadFormatError(
            f"{prefix}rope_theta: " + (f"stated twice: {sorted(found)}" if found else "is missing")
        )
    return found.pop()


def _refuse_unknown_norms(content: Mapping[str, Any]) -> None:
    """A norm that a later version of the format adds, and that would be left out."""
    known = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    for name, value in content.items():
        if "norm" in name and name not in known and value:
            raise HeadFormatError(f"{name}: {value!r} is not supported")


def _num_draft_tokens(speculation: Mapping[str, Any]) -> int:
    for method in speculation.get("proposal_methods") or ():
        count = method.get("speculative_tokens")
        if isinstance(count, int) and count >= 1:
            return count
    raise HeadFormatError("speculators_config.proposal_methods: states no speculative_tokens")


def _get(content: Mapping[str, Any], name: str, kind: Any, prefix: str = "") -> Any:
    value = content.get(name)
    if value is None:
        raise HeadFormatError(f"{prefix}{name}: is missing")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise HeadFormatError(f"{prefix}{name}: {value!r} is of the wrong type")
    return value


def _expect(
    content: Mapping[str, Any], name: str, value: Any, prefix: str = "", default: Any = None
) -> None:
    found = content.get(name, default)
    if found != value:
        raise HeadFormatError(f"{prefix}{name}: {found!r} is not supported, only {value!r}")
