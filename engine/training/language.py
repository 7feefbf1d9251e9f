"""The language that a conversation is held in, for an evaluation's breakdown."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

UNKNOWN = "unknown"
_MIN_PROBABILITY = 0.7
_MIN_LETTERS = 20  # under it a name or a number decides
_MAX_CHARACTERS = 2000


def language_reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """A function from token ids to the ISO 639-1 code of their text's language, or "unknown":
    for a text that is short or mixed, and for all where py3langid is not installed."""

    def read(token_ids: Sequence[int]) -> str:
        return language_of(str(tokenizer.decode(list(token_ids), skip_special_tokens=True)))

    return read


def language_of(text: str) -> str:
    """ISO 639-1, or "unknown"."""
    text = text[:_MAX_CHARACTERS]
    identifier = _identifier()
    if identifier is None or sum(letter.isalpha() for letter in text) < _MIN_LETTERS:
        return UNKNOWN
    language, probability = identifier.classify(text)
    return str(language) if probability >= _MIN_PROBABILITY else UNKNOWN


@cache
def _identifier() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        return None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
