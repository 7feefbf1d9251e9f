"""What a client orders and what it is told, free of protobuf."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.request import (
    MAX_LABEL_CHARACTERS,
    MAX_LABELS,
    AcceptanceRule,
    FinishReason,
    RequestError,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    StructuredOutput,
    TokenLogprob,
)
from engine.stats import RequestStats

_REQUEST_ID = re.compile(r"[A-Za-z0-9\-_.:]{1,128}")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """messages and tools are as chat templates expect them: JSON-like mappings."""

    messages: tuple[Mapping[str, object], ...]
    tools: tuple[Mapping[str, object], ...] = ()
    continue_last_message: bool = False


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerationOrder:
    """One call of Generate or GenerateUnary. The checks that need no model have been made.

    seed is None when the client gave none. labels are sorted by key.
    """

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    stopping: StoppingParams
    speculation: SpeculationParams
    structured_output: StructuredOutput | None = None
    seed: int | None = None
    num_completions: int = 1
    priority: int = 0
    labels: tuple[tuple[str, str], ...] = ()
    resume_token_ids: tuple[int, ...] = ()
    wants_prompt_token_ids: bool = False

    def __post_init__(self) -> None:
        if not _REQUEST_ID.fullmatch(self.request_id):
            raise RequestError(
                "request_id", "must be 1 to 128 characters out of letters, digits and -_.:"
            )
        _check_labels(self.labels)
        if self.resume_token_ids:
            self._check_resumable()

    def _check_resumable(self) -> None:
        """Refuse what depends on which tokens are output rather than prompt."""
        reasons = (
            (self.seed is None and not self.sampling.is_greedy, "needs the seed"),
            (self.num_completions != 1, "is for one completion"),
            (bool(self.stopping.stop_strings), "cannot be combined with stop strings"),
            (self.structured_output is not None, "cannot be combined with structured output"),
            (self.sampling.prompt_logprobs, "cannot be combined with prompt_logprobs"),
            (
                bool(self.sampling.presence_penalty or self.sampling.frequency_penalty),
                "cannot be combined with presence or frequency penalties",
            ),
            (
                len(self.resume_token_ids) >= self.stopping.max_tokens,
                "already holds max_tokens tokens",
            ),
        )
        for is_wrong, reason in reasons:
            if is_wrong:
                raise RequestError("resume_token_ids", reason)


def _check_labels(labels: tuple[tuple[str, str], ...]) -> None:
    if len(labels) > MAX_LABELS:
        raise RequestError("labels", f"has {len(labels)} entries, at most {MAX_LABELS}")
    for key, value in labels:
        if not 1 <= len(key) <= MAX_LABEL_CHARACTERS:
            raise RequestError("labels", f"a key must have 1 to {MAX_LABEL_CHARACTERS} characters")
        if len(value) > MAX_LABEL_CHARACTERS:
            raise RequestError(
                f"labels[{key}]", f"has {len(value)} characters, at most {MAX_LABEL_CHARACTERS}"
            )


@dataclass(frozen=True, slots=True)
class Started:
    """The engine has taken the request.

    prompt_token_ids is empty unless asked for. resumed_text is the certain text of the tokens
    taken over from a broken stream. speculation names who may draft, and how much.
    """

    request_id: str
    model: str
    num_prompt_tokens: int
    seed: int
    max_tokens: int
    guarantee: str
    prompt_token_ids: tuple[int, ...] = ()
    resumed_text: str = ""
    variant: str = ""
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    acceptance_rule: AcceptanceRule = AcceptanceRule.COUPLED
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step gave one completion."""

    choice_index: int
    first_token_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A request's share of the machine. None: not known."""

    nano_usd: int | None = None
    microjoules: int | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A completion that has ended."""

    choice_index: int
    stats: RequestStats
    charge: Charge
    num_output_tokens: int  # tokens taken over from a broken stream included
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """Every completion has ended, in the order of their indices."""

    num_prompt_tokens: int
    choices: tuple[Choice, ...] = field(default=())


Event = Started | Delta | Finished
