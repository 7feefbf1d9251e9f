"""Prompts from files and from the target's own template, and refusals that name the line."""

from pathlib import Path

import pytest

from engine.training.conversations import Conversation, read_shard, write_shard
from engine.training.errors import TrainingError
from engine.training.prompt_sources import (
    encode_chat,
    jsonl_prompts,
    self_prompt,
    self_prompt_request,
    user_turn_opening,
)
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
USER = {"role": "user", "content": "the quick brown fox"}


def read(path: Path, *lines: str) -> list[tuple[str, str, str]]:
    path.write_text("\n".join(lines) + "\n")
    return [
        (prompt.key, prompt.source, str(TOKENIZER.decode(list(prompt.token_ids))))
        for prompt in jsonl_prompts(path, TOKENIZER, max_prompt_tokens=60)
    ]


def test_prompts_and_chats_are_read_as_the_target_would_be_asked(tmp_path: Path) -> None:
    answered = '[{"role":"user","content":"a dog"},{"role":"assistant","content":"sees"}]'
    long = "person " * 80
    found = read(
        tmp_path / "p.jsonl",
        '{"prompt": "the quick brown fox", "source": "chat"}',
        "",
        f'{{"messages": {answered}}}',
        f'{{"prompt": "{long}"}}',
    )
    opening = "<|start|>user\n"
    assert found == [
        ("p.jsonl:1", "chat", f"{opening}the quick brown fox<eos><|start|>assistant\n"),
        ("p.jsonl:3", "", f"{opening}a dog<eos><|start|>assistant\n"),
    ]


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": " "}', '{"messages": []}', '{"messages": ["hello"]}']
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(TrainingError, match=r"p\.jsonl:2"):
        read(tmp_path / "p.jsonl", '{"prompt": "a dog"}', line)


def test_a_target_prompts_itself_from_where_its_template_lets_the_user_speak() -> None:
    opening = user_turn_opening(TOKENIZER)
    assert TOKENIZER.decode(opening) == "<|start|>user\n"
    first, second = (self_prompt_request(index, opening, seed=3) for index in (0, 1))
    assert first.prompt_token_ids == tuple(opening)
    assert first.sampling.seed != second.sampling.seed
    written = TOKENIZER("the quick brown fox", add_special_tokens=False)["input_ids"]
    prompt = self_prompt(0, [*written, TOKENIZER.eos_token_id], TOKENIZER)
    assert prompt is not None
    assert list(prompt.token_ids) == encode_chat(TOKENIZER, [USER])
    assert self_prompt(0, [TOKENIZER.eos_token_id], TOKENIZER) is None


def test_a_template_that_cannot_be_opened_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for template, named in ((None, "no chat template"), ("always the same", "does not show")):
        monkeypatch.setattr(TOKENIZER, "chat_template", template)
        with pytest.raises(TrainingError, match=named):
            user_turn_opening(TOKENIZER)


def test_a_shard_keeps_where_the_prompt_ends(tmp_path: Path) -> None:
    row = Conversation("a", "chat", (5, 9), (7, 1), "stop", 0.7, 11)
    write_shard(tmp_path, 0, [row])
    (path,) = tmp_path.iterdir()
    assert read_shard(path) == [row]
    path.write_text(path.read_text() + '{"key": "b"}\n')
    with pytest.raises(TrainingError, match=r"shard-000000\.jsonl:2"):
        read_shard(path)
