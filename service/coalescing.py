"""Messages whose size tells nothing about how many drafted tokens were accepted.

See "The length side channel of speculation" in SECURITY.md.
"""

from collections.abc import Sequence
from dataclasses import replace

from engine.request import TokenDelta


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Successive deltas of one request as one; the last one says how it ended."""
    first, last = deltas[0], deltas[-1]
    texts = [delta.text for delta in deltas if delta.text is not None]
    return replace(
        last,
        first_token_index=first.first_token_index,
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=tuple(entry for delta in deltas for entry in delta.prompt_logprobs),
        text="".join(texts) if texts else None,
    )


class TokenGroups:
    """Cuts the deltas of one request into groups of exactly num_tokens; only the last group may
    be shorter. A text that the engine gives goes out with the first group that can carry it."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: TokenDelta | None = None

    def push(self, delta: TokenDelta) -> list[TokenDelta]:
        """The groups that are full with this delta, and all the rest with the last one."""
        held = delta if self._held is None else merge((self._held, delta))
        groups: list[TokenDelta] = []
        size = self._num_tokens
        is_last = delta.finish_reason is not None
        while len(held.token_ids) > size or (not is_last and len(held.token_ids) == size):
            groups.append(
                replace(
                    held,
                    token_ids=held.token_ids[:size],
                    logprobs=held.logprobs[:size],
                    finish_reason=None,
                    stop_token_id=None,
                    stop_string=None,
                    error=None,
                )
            )
            held = replace(
                held,
                first_token_index=held.first_token_index + size,
                token_ids=held.token_ids[size:],
                logprobs=held.logprobs[size:],
                prompt_logprobs=(),
                text=None if held.text is None else "",
            )
        self._held = None if is_last else held
        if is_last:
            groups.append(held)
        return groups
