"""Token ids to text, a few at a time, never half a character."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "�"


class Detokenizer:
    """The text of one request as it grows.

    The joined results of `push` and `finish` equal decoding all tokens at once. Text that may
    still change (a character whose bytes are not all there) is held back until it is certain
    or the request ends.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._token_ids: list[int] = []
        self._context_start = 0  # decoding starts here, so that the tokens join as in the whole
        self._shown_end = 0  # tokens before here have been shown in full

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        self._token_ids.extend(token_ids)
        shown = self._decode(self._context_start, self._shown_end)
        text = self._decode(self._context_start, len(self._token_ids))
        if text.endswith(_REPLACEMENT) or len(text) <= len(shown):
            return ""
        self._context_start = self._shown_end
        self._shown_end = len(self._token_ids)
        return text[len(shown) :]

    def finish(self) -> str:
        """What was held back. Bytes that never became a character show as U+FFFD."""
        shown = self._decode(self._context_start, self._shown_end)
        text = self._decode(self._context_start, len(self._token_ids))
        self._context_start = self._shown_end
        self._shown_end = len(self._token_ids)
        return text[len(shown) :]

    def _decode(self, start: int, stop: int) -> str:
        text = self._tokenizer.decode(
            self._token_ids[start:stop],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text if isinstance(text, str) else "".join(text)
