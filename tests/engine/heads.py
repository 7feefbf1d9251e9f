"""Heads for tiny targets, trained in seconds so that their configuration matters."""

import torch
import torch.nn.functional as F

from engine.drafter.head.config import HeadConfig
from engine.drafter.head.model import Eagle3Head
from engine.loader import LoadedModel, describe_model
from engine.training.capture import Capturer
from engine.training.initialize import HeadShape, fresh_head, head_config
from engine.training.unrolled import Batch, make_batch, unroll
from tests.tiny import VOCAB_SIZE, tiny_llama, tiny_tokenizer

NUM_LAYERS = 8
NUM_TEXTS = 6
TEXT_TOKENS = 32


def tiny_target(seed: int = 0, num_layers: int = NUM_LAYERS) -> LoadedModel:
    return describe_model("tiny", tiny_llama(seed, num_layers=num_layers), tiny_tokenizer())


def texts(seed: int = 0, count: int = NUM_TEXTS) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    shape = (count, TEXT_TOKENS)
    drawn = torch.randint(3, VOCAB_SIZE, shape, generator=generator)
    return [tuple(row) for row in drawn.tolist()]


def config_for(target: LoadedModel, draft_vocab_size: int = VOCAB_SIZE) -> HeadConfig:
    shape = HeadShape(draft_vocab_size=draft_vocab_size)
    return head_config(target.model, target.name, shape)


def random_head(
    target: LoadedModel, config: HeadConfig | None = None, vocabulary: list[int] | None = None
) -> Eagle3Head:
    config = config or config_for(target)
    head = fresh_head(config, target.model, vocabulary or list(range(config.draft_vocab_size)), 0)
    return head.eval().requires_grad_(False)


def batch_of(target: LoadedModel, config: HeadConfig, rows: list[tuple[int, ...]]) -> Batch:
    capturer = Capturer(target.model, config.captured_layers)
    try:
        return make_batch(capturer.capture([(row, 1) for row in rows]))
    finally:
        capturer.close()


def trained_head(
    target: LoadedModel, config: HeadConfig, *, num_steps: int = 3, num_updates: int = 120
) -> Eagle3Head:
    """Fits the target's own next tokens over `texts()`, every draft step of every position."""
    head = fresh_head(config, target.model, list(range(config.draft_vocab_size)), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # norms that change directions, so that leaving one out is felt
        for norm in (head.norm, head.layers[0].hidden_norm):  # type: ignore[union-attr]
            norm.weight.uniform_(0.2, 3.0, generator=generator)  # type: ignore[union-attr,operator]
    batch = batch_of(target, config, texts())
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    with torch.inference_mode(False):
        batch = Batch(*(getattr(batch, name).clone() for name in Batch.__slots__))
        for _ in range(num_updates):
            losses = []
            for step, output in enumerate(unroll(head, batch, num_steps)):
                is_taught = batch.depth_limits > step
                labels = batch.best_token_ids[(batch.teacher_rows + step)[is_taught]]
                losses.append(F.cross_entropy(head.lm_head(output[is_taught]), labels))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()
    return head.eval().requires_grad_(False)
