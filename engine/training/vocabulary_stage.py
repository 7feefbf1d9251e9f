"""The draft vocabulary of a run: chosen once, then kept for the life of its heads.

Choosing it anew from other data would silently change what the output rows of a trained head
mean.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.drafter.head.model import Eagle3Head
from engine.training import atomic_files
from engine.training.conversations import Conversation, is_held_out, read_conversations
from engine.training.initialize import HeadShape, head_config
from engine.training.run import Run
from engine.training.vocabulary import (
    choose_size,
    count_tokens,
    coverage,
    select_vocabulary,
)


def choose_vocabulary(run: Run) -> list[int]:
    """The draft vocabulary of the run: chosen once, by the main process, then kept for the life
    of its heads."""
    path = run.folder / "vocabulary.json"
    run.on_main(lambda: None if path.exists() else _choose(run, path))
    return [int(token_id) for token_id in json.loads(path.read_text())["token_ids"]]


def _choose(run: Run, path: Path) -> None:
    share = run.recipe.data.held_out_share
    conversations = list(read_conversations(run.folder / "data"))
    vocab_size = run.target.model.config.get_text_config().vocab_size
    trained = [c for c in conversations if not is_held_out(c.key, share)]
    counts = count_tokens((c.output_token_ids for c in trained), vocab_size)
    # Prompts are text like the served one; an output token weighs as much as sixteen of them.
    broad = 16 * counts + count_tokens((c.prompt_token_ids for c in trained), vocab_size)
    out = _held_out_counts(conversations, share, vocab_size)
    size = run.recipe.head.draft_vocab_size or _size_by_cost(run, broad, out)
    chosen = select_vocabulary(broad, min(size, vocab_size), run.target.eos_token_ids)
    atomic_files.write_json(
        path,
        {
            "coverage_trained": coverage(counts, chosen),
            "coverage_held_out": coverage(out, chosen),
            "token_ids": chosen.tolist(),
        },
    )


def _size_by_cost(run: Run, counts: torch.Tensor, out: torch.Tensor) -> int:
    model = run.target.model
    config = head_config(model, "", HeadShape(1, run.captured_layers))
    head = Eagle3Head(config)
    trained = (p for n, p in head.named_parameters() if not n.startswith(("embed", "lm_head")))
    return choose_size(
        counts,
        out,
        num_body_parameters=sum(p.numel() for p in trained),
        hidden_size=config.hidden_size,
        num_target_parameters=run.target.num_parameters,
        num_drafts=run.recipe.head.num_draft_tokens,
        always=run.target.eos_token_ids,
    )


def _held_out_counts(
    conversations: Sequence[Conversation], share: float, vocab_size: int
) -> torch.Tensor:
    out = (c.output_token_ids for c in conversations if is_held_out(c.key, share))
    return count_tokens(out, vocab_size)
