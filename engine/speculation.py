"""How many tokens each row may draft; 0 is plain decoding, without a drafter.

The choice of a row depends on its own history alone, so its acceptance does not depend on
its neighbours. Acceptance is censored by K: a full acceptance says only "at least K", and
counts as one more than was observed.
"""

from dataclasses import dataclass

from engine.live_request import LiveRequest
from engine.request import SpeculationMode

_WEIGHT = 0.3  # of the newest observation in the moving average
_HOPELESS = 0.25  # below this many accepted tokens per verification a row only probes
_STEPS_BETWEEN_PROBES = 8


@dataclass(slots=True)
class _RowHistory:
    accepted: float
    steps_since_draft: int = 0


class DraftLengths:
    """Chooses K per row and learns from what was accepted."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._history: dict[str, _RowHistory] = {}

    def choose(self, live: LiveRequest) -> int:
        """K for the next step of a decoding row."""
        wanted = live.request.speculation
        if wanted.mode is SpeculationMode.OFF:
            return 0
        cap = self.max_draft_tokens
        if wanted.max_draft_tokens is not None:
            cap = min(cap, wanted.max_draft_tokens)
        if wanted.mode is SpeculationMode.ON or cap == 0:
            return cap
        history = self._history.setdefault(live.request_id, _RowHistory(accepted=float(cap)))
        history.steps_since_draft += 1
        if history.accepted < _HOPELESS and history.steps_since_draft < _STEPS_BETWEEN_PROBES:
            return 0
        return max(1, min(cap, round(history.accepted + 0.5)))

    def observe(self, live: LiveRequest, num_drafts: int, num_accepted: int) -> None:
        """Learn from one verification."""
        history = self._history.get(live.request_id)
        if history is None or num_drafts == 0:
            return
        observed = num_accepted + (num_accepted == num_drafts)
        history.accepted += _WEIGHT * (observed - history.accepted)
        history.steps_since_draft = 0

    def forget(self, request_id: str) -> None:
        self._history.pop(request_id, None)
