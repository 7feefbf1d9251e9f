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
        self._settled_end = 0  # tokens before here have been shown in full
        self._num_shown = 0  # characters of the text from _context_start that have been shown

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        self._token_ids.extend(token_ids)
        text = self._decode(self._context_start, len(self._token_ids))
        # The last character may be incomplete; what stands before it in the token is certain.
        certain = text.rstrip(_REPLACEMENT)
        if len(certain) < len(text):
            shown, self._num_shown = self._num_shown, max(self._num_shown, len(certain))
            return certain[shown:]
        if len(text) <= self._num_shown:
            return ""
        return self._settle(text)

    def finish(self) -> str:
        """What was held back. Bytes that never became a character show as U+FFFD."""
        return self._settle(self._decode(self._context_start, len(self._token_ids)))

    def _settle(self, text: str) -> str:
        """Show the rest of text, which all tokens from _context_start on decode to."""
        unshown = text[self._num_shown :]
        self._context_start, self._settled_end = self._settled_end, len(self._token_ids)
        self._num_shown = len(self._decode(self._context_start, self._settled_end))
        return unshown

    def _decode(self, start: int, stop: int) -> str:
        text = self._tokenizer.decode(
            self._token_ids[start:stop],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text if isinstance(text, str) else "".join(text)
