"""The text of one completion as its tokens arrive."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from engine.detokenizer import Detokenizer
from engine.request import TokenDelta


class OutputText:
    """Turns deltas into text; whole characters only.

    is_given: the engine knows the text, because it looks for stop strings in it, and sends it.
    A stop token has no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_given: bool) -> None:
        self._detokenizer = None if is_given else Detokenizer(tokenizer)

    def resume(self, token_ids: Sequence[int]) -> str:
        """The certain text of tokens that an earlier stream has brought."""
        if self._detokenizer is None:
            return ""
        return "".join(self._detokenizer.push((token_id,)) for token_id in token_ids)

    def push(self, delta: TokenDelta) -> str:
        """The text that became certain with this delta, and all the rest with the last one."""
        if self._detokenizer is None:
            return delta.text or ""
        token_ids = delta.token_ids
        if delta.stop_token_id is not None and token_ids[-1:] == (delta.stop_token_id,):
            token_ids = token_ids[:-1]
        text = self._detokenizer.push(token_ids) if token_ids else ""
        if delta.finish_reason is not None:
            text += self._detokenizer.finish()
        return text
