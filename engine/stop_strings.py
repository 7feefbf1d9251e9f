"""Stop strings over text that arrives in pieces, across token and draft boundaries."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.detokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class StopMatch:
    """num_tokens of the pushed tokens are kept: the last of them completed stop_string."""

    stop_string: str
    num_tokens: int


class StopStringWatcher:
    """Watches the text of one request.

    Text that may be the beginning of a stop string is held back, at most one character less
    than the longest stop string. The stop string completed first wins; among those completed
    by the same token, the one that starts first.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        *,
        include_stop_string: bool,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_strings = tuple(stop_strings)
        self._include_stop_string = include_stop_string
        self._pending = ""  # certain text that has not been shown

    def push(self, token_ids: Sequence[int]) -> tuple[str, StopMatch | None]:
        """Text that may be shown now, and the match if one is complete."""
        for index, token_id in enumerate(token_ids):
            self._pending += self._detokenizer.push([token_id])
            found = self._find()
            if found is not None:
                start, stop_string = found
                end = start + len(stop_string) if self._include_stop_string else start
                text, self._pending = self._pending[:end], ""
                return text, StopMatch(stop_string, index + 1)
        return self._show_safe(), None

    def finish(self) -> str:
        """The held-back text of a request that ends without a match."""
        text, self._pending = self._pending + self._detokenizer.finish(), ""
        return text

    def _find(self) -> tuple[int, str] | None:
        starts = [(self._pending.find(stop), stop) for stop in self._stop_strings]
        found = [(start, stop) for start, stop in starts if start >= 0]
        return min(found, key=lambda match: match[0]) if found else None

    def _show_safe(self) -> str:
        longest = max(len(stop) for stop in self._stop_strings) - 1
        for start in range(max(0, len(self._pending) - longest), len(self._pending)):
            tail = self._pending[start:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                text, self._pending = self._pending[:start], tail
                return text
        text, self._pending = self._pending, ""
        return text
