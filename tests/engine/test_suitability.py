"""What a short check at start cannot see is judged by the configuration."""

import pytest
from transformers import LlamaConfig, Phi3Config

from engine.loader import UnsupportedModelError
from engine.suitability import agreement_length, attention_shape, check_configuration
from tests.engine.test_models import build

LONG = 16384
WINDOW = 8192  # longer than any check at start


def test_dynamic_rope_is_refused_beyond_its_context_and_accepted_within() -> None:
    config = LlamaConfig(
        max_position_embeddings=512,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )
    check_configuration("tiny", config, 512)
    with pytest.raises(UnsupportedModelError, match="set max_model_tokens"):
        check_configuration("tiny", config, 513)


def test_longrope_is_refused_beyond_the_length_where_it_switches() -> None:
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        max_position_embeddings=LONG,
        original_max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
        },
    )
    check_configuration("tiny", config, 4096)
    with pytest.raises(UnsupportedModelError, match="set max_model_tokens to 4096 or less"):
        check_configuration("tiny", config, 4097)


def test_rope_that_is_scaled_once_and_for_all_is_accepted_at_any_length() -> None:
    config = LlamaConfig(
        max_position_embeddings=LONG,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
        },
    )
    check_configuration("tiny", config, LONG)


def test_the_check_goes_beyond_a_sliding_window() -> None:
    model = build("olmo3", {"sliding_window": 100, "max_position_embeddings": 512})
    assert agreement_length(model, 512) == 116
    assert agreement_length(model, 64) == 63


def test_a_window_too_long_to_check_must_be_asked_for_by_the_layers() -> None:
    changes = {"sliding_window": WINDOW, "max_position_embeddings": LONG}
    model = build("olmo3", changes)
    num_tokens = agreement_length(model, LONG)
    assert num_tokens < WINDOW
    attention_shape("tiny", model, num_tokens)
    silent = build("olmo3", changes)
    for layer in silent.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(UnsupportedModelError, match="asks for a window of None"):
        attention_shape("tiny", silent, num_tokens)
