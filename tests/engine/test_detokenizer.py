"""Text comes in whole characters, and its pieces join to what all tokens decode to."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

TEXTS = {
    "ascii": "the quick brown fox",
    "emoji": "hi 😀😃 there 🚀",
    "family of four joined by ZWJ": "👨‍👩‍👧‍👦 home",
    "skin tone and flag": "👍🏽 🇨🇭 ok",
    "Chinese": "推测解码保持输出不变。",
    "Japanese and Korean": "投機的デコード 추측",
    "combining marks": "e\u0301 a\u0308 o\u0302\u0323 z\u0335",
    "right to left": "שלום مرحبا",
    "Devanagari": "नमस्ते दुनिया",
    "four bytes beyond the plane": "𝕊𝕡𝕖𝕔 𓀀",
    "spaces before punctuation": "do n't stop , they 're here . ok ?",
    "spaces and newlines": "  a\n\n\t b  ",
    "a real replacement character": "a \ufffd b",
}


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text)["input_ids"]  # type: ignore[no-any-return]


def decode_all(token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    return tiny_tokenizer().decode(  # type: ignore[no-any-return]
        token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


def byte_ids(content: bytes) -> list[int]:
    """One token per byte, valid UTF-8 or not."""
    alphabet = {b: tiny_tokenizer().convert_tokens_to_ids(c) for b, c in _BYTES.items()}
    return [alphabet[b] for b in content]


def _byte_characters() -> dict[int, str]:
    """How byte-level BPE writes each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(rest)}


_BYTES = _byte_characters()


def pieces(token_ids: list[int], sizes: list[int] | None = None) -> list[str]:
    """Pushes of these sizes (one token each by default), then finish."""
    detokenizer = Detokenizer(tiny_tokenizer())
    found, start = [], 0
    sizes = sizes or [1] * len(token_ids)
    while start < len(token_ids):
        size = sizes[len(found) % len(sizes)]
        found.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    return [*found, detokenizer.finish()]


@pytest.mark.parametrize("name", TEXTS)
def test_the_pieces_join_to_the_text(name: str) -> None:
    found = pieces(ids_of(TEXTS[name]))
    assert "".join(found) == TEXTS[name]
    if "\ufffd" not in TEXTS[name]:
        assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("name", TEXTS)
def test_a_character_is_shown_as_soon_as_its_last_byte_is_there(name: str) -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    shown = ""
    content = TEXTS[name].replace("\ufffd", "?").encode()
    for end, token_id in enumerate(byte_ids(content), start=1):
        shown += detokenizer.push([token_id])
        assert shown == content[:end].decode(errors="ignore")


@settings(deadline=None, max_examples=300)
@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_any_tokens_in_any_split_join_to_what_all_decode_to(
    token_ids: list[int], sizes: list[int]
) -> None:
    assert "".join(pieces(token_ids, sizes)) == decode_all(token_ids)


@settings(deadline=None, max_examples=300)
@given(
    content=st.lists(
        st.one_of(
            st.binary(min_size=1, max_size=3), st.sampled_from([t.encode() for t in TEXTS.values()])
        ),
        max_size=5,
    ),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
)
def test_valid_and_invalid_bytes_in_any_split_join_to_the_whole(
    content: list[bytes], sizes: list[int]
) -> None:
    token_ids = byte_ids(b"".join(content))
    shown = ""
    whole = decode_all(token_ids)
    for piece in pieces(token_ids, sizes):
        shown += piece
        assert whole.startswith(shown), "text was shown that later tokens changed"
    assert shown == whole == b"".join(content).decode(errors="replace")


def test_half_a_character_is_held_back_and_shows_as_replacement_at_the_end_only() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    assert detokenizer.push(byte_ids("a😀".encode()[:3])) == "a"
    assert detokenizer.push([]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_whole_characters_before_half_a_one_are_shown_at_once() -> None:
    detokenizer = Detokenizer(tiny_tokenizer())
    half = "end.你".encode()[:-1]
    assert detokenizer.push(byte_ids(half)) == "end."
    assert detokenizer.push(byte_ids("你".encode()[-1:])) == "你"


def test_special_tokens_are_left_out_of_the_text_unless_they_are_wanted() -> None:
    token_ids = [*ids_of("a fox"), EOS_TOKEN_ID, *ids_of(" jumps")]
    assert "".join(pieces(token_ids)) == "a fox jumps"
    wanted = Detokenizer(tiny_tokenizer(), skip_special_tokens=False)
    joined = "".join(wanted.push([token_id]) for token_id in token_ids) + wanted.finish()
    assert joined == decode_all(token_ids, skip_special_tokens=False)
    assert "<eos>" in joined


@cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words begin with a marked space that the decoder strips at the start; what is not in the
    vocabulary falls back to bytes (Llama, Gemma)."""
    words = ["<unk>", "<eos>", "▁the", "▁fox", "▁", "s", "x", "."]
    vocabulary = {w: i for i, w in enumerate([*words, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


@pytest.mark.parametrize("seed", range(20))
def test_marked_spaces_and_fallback_bytes_join_as_in_the_whole(seed: int) -> None:
    tokenizer = sentencepiece_like()
    chooser = random.Random(seed)
    token_ids: list[int] = []
    for _ in range(12):
        character = chooser.choice(["é", "你", "😀", None, None, None])
        if character is None:
            token_ids.append(chooser.randrange(1, 8))
        else:
            names = [f"<0x{b:02X}>" for b in character.encode()]
            token_ids.extend(tokenizer.convert_tokens_to_ids(names))
    detokenizer = Detokenizer(tokenizer)
    found = [detokenizer.push([token_id]) for token_id in token_ids] + [detokenizer.finish()]
    whole = tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert "".join(found) == whole
    assert not any("\ufffd" in piece for piece in found)
