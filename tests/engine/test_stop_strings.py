"""Stop strings are found wherever tokens and drafts cut them, and ids and text are cut alike."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from engine.stop_strings import StopMatch, StopStringWatcher
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]  # type: ignore[no-any-return]


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, clean_up_tokenization_spaces=False)  # type: ignore[no-any-return]


def watcher(*stop_strings: str, include: bool = False) -> StopStringWatcher:
    return StopStringWatcher(TOKENIZER, stop_strings, include_stop_string=include)


def watch(
    token_ids: list[int], stop_strings: list[str], sizes: list[int], *, include: bool = False
) -> tuple[str, StopMatch | None, int]:
    """Text shown, the match, and how many ids are kept, pushing blocks of these sizes."""
    watching = watcher(*stop_strings, include=include)
    longest = max(len(stop) for stop in stop_strings)
    shown, start, block = "", 0, 0
    while start < len(token_ids):
        size = sizes[block % len(sizes)]
        text, match = watching.push(token_ids[start : start + size])
        shown += text
        if match is not None:
            return shown, match, start + match.num_tokens
        start += size
        block += 1
        whole = text_of(token_ids[:start]).rstrip("\ufffd")
        assert len(whole) - len(shown) <= longest - 1, "held back more than could still match"
        assert not any(stop in shown for stop in stop_strings)
    return shown + watching.finish(), None, len(token_ids)


def expected(
    token_ids: list[int], stop_strings: list[str], *, include: bool
) -> tuple[str, str | None, int]:
    """The same by looking at the whole text after every token."""
    for num_tokens in range(1, len(token_ids) + 1):
        text = text_of(token_ids[:num_tokens]).rstrip("\ufffd")
        found = [(text.find(stop), stop) for stop in stop_strings if stop in text]
        if found:
            start, stop = min(found, key=lambda match: match[0])
            return text[: start + len(stop) if include else start], stop, num_tokens
    return text_of(token_ids), None, len(token_ids)


FILLER = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 17])
def test_a_stop_string_is_found_at_every_offset(size: int, include: bool) -> None:
    for offset in range(len(FILLER)):
        text = FILLER[:offset] + "#END#" + FILLER[offset:]
        token_ids = ids_of(text)
        shown, match, num_kept = watch(token_ids, ["#END#"], [size], include=include)
        assert shown == FILLER[:offset] + ("#END#" if include else "")
        assert match is not None
        assert match.stop_string == "#END#"
        assert "#END#" in text_of(token_ids[:num_kept])
        assert "#END#" not in text_of(token_ids[: num_kept - 1]), "kept more ids than it took"


SMALL = st.text(alphabet="ab你", min_size=1, max_size=4)


@settings(deadline=None, max_examples=300)
@given(
    text=st.text(alphabet="ab你😀 ", max_size=20),
    stop_strings=st.lists(SMALL, min_size=1, max_size=3, unique=True),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_any_stop_strings_in_any_blocks_cut_as_one_look_at_the_whole_does(
    text: str, stop_strings: list[str], sizes: list[int], include: bool
) -> None:
    token_ids = ids_of(text)
    shown, match, num_kept = watch(token_ids, stop_strings, sizes, include=include)
    want_text, want_stop, want_kept = expected(token_ids, stop_strings, include=include)
    assert shown == want_text
    assert (match.stop_string if match else None) == want_stop
    assert num_kept == want_kept


@settings(deadline=None, max_examples=200)
@given(
    token_ids=st.lists(st.integers(3, 258), max_size=20),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_bytes_that_are_no_text_do_not_lose_a_character(
    token_ids: list[int], sizes: list[int]
) -> None:
    shown, match, _ = watch(token_ids, ["never in there"], sizes)
    assert match is None
    assert shown == text_of(token_ids)


def test_the_string_completed_first_wins_though_another_began_earlier() -> None:
    watching = watcher("bcde", "cd")
    shown, match = watching.push([i for c in "abcde" for i in ids_of(c)])
    assert shown == "ab"
    assert match == StopMatch("cd", 4)


def with_token(token: str) -> tuple[PreTrainedTokenizerFast, int]:
    """A tokenizer that has this byte-level token as well, and its id."""
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.add_tokens([token])
    return tokenizer, tokenizer.convert_tokens_to_ids(token)


def test_among_those_that_one_token_completes_the_earliest_start_wins() -> None:
    tokenizer, token_id = with_token("Person")
    watching = StopStringWatcher(tokenizer, ["so", "rson", "on"], include_stop_string=False)
    assert watching.push([token_id]) == ("Pe", StopMatch("rson", 1))


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    watching = watcher("abc")
    a, b, x = (ids_of(c)[0] for c in "abx")
    assert watching.push([a]) == ("", None)
    assert watching.push([b]) == ("", None)
    assert watching.push([a]) == ("ab", None)
    assert watching.push([x]) == ("ax", None)


def test_what_was_held_back_is_shown_when_the_request_ends_otherwise() -> None:
    watching = watcher("fox jumps")
    shown, match = watching.push(ids_of("a fox jump"))
    assert (shown, match) == ("a ", None)
    assert watching.finish() == "fox jump"
    assert watching.finish() == ""


def test_a_stop_string_before_half_a_character_is_found_at_its_own_token() -> None:
    tokenizer, token_id = with_token(".\u00e4")  # a full stop and the first byte of a character
    watching = StopStringWatcher(tokenizer, ["."], include_stop_string=False)
    shown, match = watching.push([*ids_of("end"), token_id, *ids_of("你")[1:]])
    assert shown == "end"
    assert match == StopMatch(".", len(ids_of("end")) + 1)


def test_nothing_is_shown_after_a_match() -> None:
    watching = watcher("x", include=True)
    shown, match = watching.push(ids_of("fox jumps"))
    assert shown == "fox"
    assert match is not None
    assert watching.finish() == ""
