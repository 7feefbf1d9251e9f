"""Bytes and operations out of a configuration are those of the model it describes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig

from engine.loader import describe_model
from tests.benchmarks.limits import (
    Machine,
    ModelCounts,
    Phase,
    limit_seconds,
    phase_bytes,
    phase_operations,
)
from tests.tiny import tiny_llama, tiny_tokenizer

MODEL = tiny_llama(num_layers=3)
COUNTS = ModelCounts.of(MODEL.config)


def test_weights_are_those_of_the_models_matrices() -> None:
    matrices = {
        name: parameter.numel()
        for name, parameter in MODEL.named_parameters()
        if parameter.dim() == 2
    }
    output = matrices.pop("lm_head.weight")
    embedding = matrices.pop("model.embed_tokens.weight")
    assert COUNTS.layer_weights == sum(matrices.values())
    assert COUNTS.output_weights == output
    assert COUNTS.embedding_size == embedding // MODEL.config.vocab_size


def test_operations_are_what_torch_counts() -> None:
    phase = Phase(num_rows=1, width=1, context=0, num_logits=1)
    MODEL.set_attn_implementation("eager")  # of fused kernels on a CPU torch counts nothing
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        MODEL(torch.tensor([[5]]), use_cache=False)
    assert phase_operations(COUNTS, phase) == counter.get_total_flops()


def test_keys_and_values_are_read_once_per_row_and_written_once_per_token() -> None:
    short, long = (phase_bytes(COUNTS, Phase(4, 1, context, 1), 2) for context in (10, 11))
    per_token = 2 * 3 * 2 * 8 * 2  # keys and values, layers, heads, head size, bytes
    assert long - short == 4 * per_token
    wide = phase_bytes(COUNTS, Phase(4, 2, 10, 1), 2)
    assert wide - short == 4 * (2 * per_token + 2 * MODEL.config.hidden_size)


def test_the_limit_is_the_slower_of_memory_and_arithmetic() -> None:
    phase = Phase(2, 3, 16, 3)
    num_bytes, operations = phase_bytes(COUNTS, phase, 4), phase_operations(COUNTS, phase)
    assert limit_seconds(COUNTS, phase, 4, Machine(num_bytes / 5, operations)) == pytest.approx(5)
    assert limit_seconds(COUNTS, phase, 4, Machine(num_bytes, operations / 7)) == pytest.approx(7)


def test_a_mixture_of_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="experts"):
        ModelCounts.of(MixtralConfig(num_hidden_layers=1))


def test_the_count_covers_nearly_all_parameters() -> None:
    described = describe_model("tiny", tiny_llama(), tiny_tokenizer())
    counts = ModelCounts.of(described.model.config)
    embedding = counts.output_weights  # of the same size, and read row by row
    assert (
        0.99
        < (counts.layer_weights + counts.output_weights + embedding) / (described.num_parameters)
        <= 1
    )
