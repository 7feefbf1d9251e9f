"""Does an output end where it has to? Told from the request and the tokens alone.

What the committer knew of stops is not used: the tokens are walked again, by rules written here a
second time, so that a stop that was missed, found too early or given the wrong name shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from engine.detokenizer import Detokenizer
from engine.request import FinishReason, GenerationRequest

_BY_ITSELF = (
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
    FinishReason.LENGTH,
    FinishReason.CONTEXT_FULL,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ended, and the stop that it ended with."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None

    @property
    def is_by_itself(self) -> bool:
        """Whether the tokens were the reason, and nobody from outside."""
        return self.reason in _BY_ITSELF


@dataclass(frozen=True, slots=True)
class WrongEnding:
    """index: of the first token that is too many, or is missing, or has the wrong name for an
    end. num_tokens: that are too many; 1 otherwise. what: for people, without content."""

    index: int
    num_tokens: int
    what: str


class EndingRules:
    """Where outputs end that a model writes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        max_model_tokens: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_tokens = max_model_tokens

    def check(
        self, request: GenerationRequest, output_token_ids: Sequence[int], ending: Ending
    ) -> WrongEnding | None:
        """None for an output that ends where and as it has to."""
        num_output = len(output_token_ids)
        due = self._first_ending(request, output_token_ids)
        if due is None:
            if not ending.is_by_itself:
                return None
            what = f"it ended with {ending.reason} after {num_output} tokens, which end nothing"
            return WrongEnding(num_output, 1, what)
        index, expected = due
        num_due = index + 1
        if num_due < num_output:
            what = f"{expected.reason} was due after {num_due} tokens, there are {num_output}"
            return WrongEnding(num_due, num_output - num_due, what)
        if ending != expected:
            what = f"it ended with {_named(ending)} where {_named(expected)} was due"
            return WrongEnding(index, 1, what)
        return None

    def stop_token_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        """Those that end its output, which cannot be drawn before min_tokens."""
        eos = () if request.stopping.ignore_eos else self._eos_token_ids
        return tuple(sorted({*request.stopping.stop_token_ids, *eos}))

    def _first_ending(
        self, request: GenerationRequest, output_token_ids: Sequence[int]
    ) -> tuple[int, Ending] | None:
        """(index of its last token, ending) of the output; None where nothing ends it."""
        stopping = request.stopping
        stop_token_ids = self.stop_token_ids(request)
        num_left = self._max_model_tokens - len(request.prompt_token_ids)
        completed = self._completed_strings(stopping.stop_strings, output_token_ids)
        for index, (token_id, stop_string) in enumerate(
            zip(output_token_ids, completed, strict=True)
        ):
            num_output = index + 1
            if stop_string is not None:
                return index, Ending(FinishReason.STOP_STRING, stop_string=stop_string)
            if token_id in stop_token_ids and num_output > stopping.min_tokens:
                return index, Ending(FinishReason.STOP_TOKEN, stop_token_id=token_id)
            if num_output >= stopping.max_tokens:
                return index, Ending(FinishReason.LENGTH)
            if num_output >= num_left:
                return index, Ending(FinishReason.CONTEXT_FULL)
        return None

    def _completed_strings(
        self, stop_strings: Sequence[str], token_ids: Sequence[int]
    ) -> Iterator[str | None]:
        """For every token the stop string that the text contains since then; of several the one
        that starts first."""
        detokenizer = Detokenizer(self._tokenizer)
        text = ""
        longest = max(map(len, stop_strings), default=0)
        for token_id in token_ids:
            if not stop_strings:
                yield None
                continue
            new = detokenizer.push([token_id])
            text = text[max(0, len(text) - longest) :] + new
            starts = [(text.find(stop), stop) for stop in stop_strings if stop in text]
            yield min(starts, key=lambda found: found[0])[1] if starts else None


def _named(ending: Ending) -> str:
    stop = "" if ending.stop_token_id is None else f" {ending.stop_token_id}"
    return f"{ending.reason}{stop}"
