"""The pulled SmolLM2: its tokenizer, its ends of turn, and what it is known to say."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.model

STORY = (
    "The sun had set on a stormy night, and the lighthouses of the world stood as a testament to "
    "the resilience of the human spirit. In the small coastal town of Ravenshire, a lighthouse "
    "keeper named Edwin"
)


def test_digits_are_tokens_of_their_own(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    pieces = tokenizer.tokenize("in 2024, 3.14")
    assert [piece for piece in pieces if piece.isdigit()] == list("2024314")
    text = "año 2024: 你好\n\tdef f(x): return x**2"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_answer_ends_with_the_end_of_turn(smollm2: Path) -> None:
    answer, ids = _greedy(smollm2, "What is the capital of France? Explain in two sentences.", 20)
    assert answer == "The capital of France is Paris.<|im_end|>"
    assert len(ids) == 8


def test_the_greedy_text_is_that_of_the_original_weights(smollm2: Path) -> None:
    answer, _ = _greedy(smollm2, "Write a short story about a lighthouse keeper.", 60)
    assert answer.startswith(STORY)


def _greedy(smollm2: Path, prompt: str, max_tokens: int) -> tuple[str, list[int]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**encoded, max_new_tokens=max_tokens, do_sample=False)
    ids = output[0, encoded["input_ids"].shape[1] :].tolist()
    return tokenizer.decode(ids), ids
