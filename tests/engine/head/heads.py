"""Tiny heads for tests: random ones, and the folder an engine loads them from."""

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from engine.drafter.head.config import HeadConfig
from engine.drafter.head.files import save_head
from engine.drafter.head.model import Eagle3Head
from engine.training.initialize import HeadShape, fresh_head, head_config
from tests.tiny import VOCAB_SIZE, tiny_llama


def deep_tiny_llama(seed: int = 0, **options: object) -> LlamaForCausalLM:
    """Six layers, so that three different ones can be captured."""
    return tiny_llama(seed, num_layers=6, **options)  # type: ignore[arg-type]


def tiny_head(target: LlamaForCausalLM, *, draft_vocab_size: int = VOCAB_SIZE - 64) -> Eagle3Head:
    """Random weights, wide enough apart that an argmax is no tie."""
    shape = HeadShape(draft_vocab_size=draft_vocab_size)
    config: HeadConfig = head_config(target, "tiny", shape)
    vocabulary = list(range(draft_vocab_size - 8)) + list(range(VOCAB_SIZE - 8, VOCAB_SIZE))
    head = fresh_head(config, target, vocabulary, seed=3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if parameter.requires_grad and parameter.dim() == 2:
                parameter.mul_(12.0)
            if name == "fc.weight":
                parameter.mul_(0.5)
    return head.eval().requires_grad_(False)


def save_tiny_head(folder: Path, head: Eagle3Head, **card: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_head(folder, head, card, dtype=torch.float32)
    return folder
