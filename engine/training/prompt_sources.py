"""Where training's prompts come from: a JSONL file, or the target's own imagination.

Self-prompting (the idea of Magpie, arXiv 2406.08464): the target is given its chat template
up to where the user speaks, and writes the user's turn itself. It needs no data at all.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from engine.training.conversations import Prompt
from engine.training.errors import TrainingError

_MARKER = "\u2402user\u2402"
_SELF_PROMPT_TOKENS = 96
_SELF_PROMPT_TEMPERATURE = 1.0
_SELF_PROMPT_TOP_P = 0.95


def encode_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]]
) -> list[int]:
    """The tokens of a conversation up to where the assistant speaks."""
    encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    token_ids: Any = encoded if isinstance(encoded, list) else encoded["input_ids"]  # type: ignore[index]
    return [int(token_id) for token_id in token_ids]


def jsonl_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int
) -> Iterator[Prompt]:
    """One prompt per line: {"prompt": text} or {"messages": [...]}, with an optional "source".

    Longer prompts are left out. Raises TrainingError naming the file, the line and the field.
    """
    if not path.is_file():
        raise TrainingError(f"data.prompts: {path} is no file")
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            messages, source = _messages(line, where)
            token_ids = encode_chat(tokenizer, messages)
            if len(token_ids) <= max_prompt_tokens:
                yield Prompt(f"{path.name}:{number}", source, tuple(token_ids))


def _messages(line: str, where: str) -> tuple[list[dict[str, Any]], str]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TrainingError(f"{where}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise TrainingError(f"{where}: must be an object with `prompt` or `messages`")
    source = str(row.get("source", ""))
    prompt, messages = row.get("prompt"), row.get("messages")
    if isinstance(prompt, str) and prompt.strip():
        return [{"role": "user", "content": prompt}], source
    if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        # The target answers the last user turn; what somebody else answered is not its own.
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if messages:
            return messages, source
    raise TrainingError(
        f"{where}: needs `prompt`, a text, or `messages`, a list that ends in a user turn"
    )


def user_turn_opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The chat template's tokens up to where the user's first turn begins.

    Raises TrainingError for a template that changes or hides what the user says.
    """
    if tokenizer.chat_template is None:
        raise TrainingError("data.self_prompts: the target's tokenizer has no chat template")
    text = str(
        tokenizer.apply_chat_template([{"role": "user", "content": _MARKER}], tokenize=False)
    )
    before, marker, _ = text.partition(_MARKER)
    if not marker:
        raise TrainingError("data.self_prompts: the chat template does not show the user's text")
    return [int(t) for t in tokenizer(before, add_special_tokens=False)["input_ids"]]


def self_prompt_request(index: int, opening: Sequence[int], seed: int) -> GenerationRequest:
    """Asks the target to write a user's turn."""
    return GenerationRequest(
        f"self-prompt-{index}",
        tuple(opening),
        SamplingParams(
            temperature=_SELF_PROMPT_TEMPERATURE, top_p=_SELF_PROMPT_TOP_P, seed=seed + index
        ),
        StoppingParams(max_tokens=_SELF_PROMPT_TOKENS),
        SpeculationParams(SpeculationMode.AUTO),
    )


def self_prompt(
    index: int, output_token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> Prompt | None:
    """The prompt made of a turn that the target wrote; None if it wrote nothing."""
    text = str(tokenizer.decode(list(output_token_ids), skip_special_tokens=True)).strip()
    if not text:
        return None
    token_ids = encode_chat(tokenizer, [{"role": "user", "content": text}])
    return Prompt(f"self:{index}", "self", tuple(token_ids))
