"""What a client asks of the engine, and what it gets back: plain frozen data.

A `GenerationRequest` crosses from the service into the engine; `TokenDelta` and
`RequestStats` (engine.stats) cross back. Everything is checked on construction, so the
step loop never sees a bad value: a `RequestError` names the field it refuses.
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum


class RequestError(ValueError):
    """A value that cannot be served. `field` is the path of the value in the request."""

    def __init__(self, field_path: str, reason: str) -> None:
        super().__init__(f"{field_path}: {reason}")
        self.field = field_path
        self.reason = reason


class FinishReason(StrEnum):
    """Why a request produces no further tokens."""

    STOP_TOKEN = "stop_token"  # an end-of-sequence token or one of stop_token_ids
    STOP_STRING = "stop_string"
    LENGTH = "length"  # max_tokens reached
    CONTEXT_FULL = "context_full"  # prompt and output fill the model's context
    TIME_LIMIT = "time_limit"  # soft limit of the request: the output so far is kept
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the caller's hard deadline
    ERROR = "error"


class AcceptanceRule(StrEnum):
    """How a drafted token is accepted when sampling; both leave the target's distribution.

    coupled: the target draws with noise that depends only on (seed, position, token), so the
      text of a seed is the same with any drafter, any K and any batch.
    rejection: accept with min(1, target/draft); reproducible only in distribution.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"


class SpeculationMode(StrEnum):
    """off: plain decoding. on: always draft. auto: the goodput controller chooses K."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


class StructuredOutputKind(StrEnum):
    """What constrains the output."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # text is a JSON array of strings
    GRAMMAR = "grammar"  # Lark syntax


MIN_TEMPERATURE = 1e-4  # logits divided by less leave no room for the noise in float32
MAX_GRAMMAR_CHARACTERS = 65_536
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 32
MAX_STOP_STRINGS = 8
MAX_STOP_STRING_CHARACTERS = 256
MAX_LOGIT_BIAS_ENTRIES = 300
MAX_TOKEN_LIST_ENTRIES = 4096
MAX_LABELS = 16
MAX_LABEL_CHARACTERS = 64


def _require(condition: bool, field_path: str, reason: str) -> None:
    if not condition:
        raise RequestError(field_path, reason)


def _finite(value: float, field_path: str) -> None:
    _require(math.isfinite(value), field_path, f"must be a finite number, got {value}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the target's logits.

    temperature 0 is greedy. Processors apply in this order, at every position with the
    history of that position: allowed and banned tokens, logit_bias, penalties, temperature,
    top_k, top_p, min_p, typical_p. A seed of None is replaced by a random one when the
    request is made, so that every sampled request can be repeated.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: every token is allowed
    banned_token_ids: tuple[int, ...] = ()
    seed: int = 0
    acceptance_rule: AcceptanceRule = AcceptanceRule.COUPLED
    num_top_logprobs: int | None = None  # None: no logprobs; 0: of the emitted token only
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _finite(getattr(self, name), f"sampling.{name}")
        _require(
            self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 100,
            "sampling.temperature",
            f"must be 0 (greedy) or between {MIN_TEMPERATURE} and 100, got {self.temperature}",
        )
        _require(
            0 <= self.top_k < 2**31,
            "sampling.top_k",
            f"must be in [0, 2**31), got {self.top_k}",
        )
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _require(0 < value <= 1, f"sampling.{name}", f"must be in (0, 1], got {value}")
        _require(0 <= self.min_p <= 1, "sampling.min_p", f"must be in [0, 1], got {self.min_p}")
        _require(
            0.01 <= self.repetition_penalty <= 100,
            "sampling.repetition_penalty",
            f"must be between 0.01 and 100, got {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(
                -100 <= value <= 100, f"sampling.{name}", f"must be in [-100, 100], got {value}"
            )
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS_ENTRIES,
            "sampling.logit_bias",
            f"has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES}",
        )
        for token_id, bias in self.logit_bias:
            _finite(bias, f"sampling.logit_bias[{token_id}]")
            _require(
                -1000 <= bias <= 1000,
                f"sampling.logit_bias[{token_id}]",
                f"must be in [-1000, 1000], got {bias}",
            )
        for name in ("allowed_token_ids", "banned_token_ids"):
            values = getattr(self, name)
            _require(
                len(values) <= MAX_TOKEN_LIST_ENTRIES,
                f"sampling.{name}",
                f"has {len(values)} entries, at most {MAX_TOKEN_LIST_ENTRIES}",
            )
        _require(
            not self.allowed_token_ids
            or not set(self.allowed_token_ids) <= set(self.banned_token_ids),
            "sampling.banned_token_ids",
            "bans every allowed token",
        )
        _require(0 <= self.seed < 2**63, "sampling.seed", f"must be in [0, 2**63), got {self.seed}")
        _require(
            self.num_top_logprobs is None or 0 <= self.num_top_logprobs <= MAX_TOP_LOGPROBS,
            "output.top_logprobs",
            f"must be between 0 and {MAX_TOP_LOGPROBS}, got {self.num_top_logprobs}",
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """When a request ends. The earliest completion wins; ties go to the token that completes it."""

    max_tokens: int = 256
    min_tokens: int = 0  # end-of-sequence and stop tokens cannot be drawn before this many
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    ignore_eos: bool = False
    time_limit_seconds: float | None = None

    def __post_init__(self) -> None:
        _require(
            self.max_tokens >= 1,
            "stopping.max_tokens",
            f"must be at least 1, got {self.max_tokens}",
        )
        _require(
            0 <= self.min_tokens <= self.max_tokens,
            "stopping.min_tokens",
            f"must be between 0 and max_tokens ({self.max_tokens}), got {self.min_tokens}",
        )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stopping.stop_token_ids",
            f"has {len(self.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS}",
        )
        _require(
            len(self.stop_strings) <= MAX_STOP_STRINGS,
            "stopping.stop_strings",
            f"has {len(self.stop_strings)} entries, at most {MAX_STOP_STRINGS}",
        )
        for index, text in enumerate(self.stop_strings):
            _require(
                0 < len(text) <= MAX_STOP_STRING_CHARACTERS,
                f"stopping.stop_strings[{index}]",
                f"must have 1 to {MAX_STOP_STRING_CHARACTERS} characters, has {len(text)}",
            )
        if self.time_limit_seconds is not None:
            _finite(self.time_limit_seconds, "stopping.time_limit")
            _require(self.time_limit_seconds > 0, "stopping.time_limit", "must be positive")


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """What a request wants of speculation. None leaves the choice to the server.

    drafter: the only one that may draft. drafters: those that may where drafter is None, the
    first choice first; the next one drafts where one proposes nothing, keeps missing or has failed.
    """

    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    drafter: str | None = None
    drafters: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _require(
            self.max_draft_tokens is None or 0 <= self.max_draft_tokens <= 64,
            "speculation.max_draft_tokens",
            f"must be between 0 and 64, got {self.max_draft_tokens}",
        )

    @property
    def named_drafters(self) -> tuple[str, ...] | None:
        """The names that the request gives, None when it gives none."""
        return self.drafters if self.drafter is None else (self.drafter,)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The output must satisfy this; it always does unless max_tokens cuts it."""

    kind: StructuredOutputKind
    text: str

    def __post_init__(self) -> None:
        field_path = f"structured_output.{self.kind}"
        _require(bool(self.text), field_path, "must not be empty")
        _require(
            len(self.text) <= MAX_GRAMMAR_CHARACTERS,
            field_path,
            f"has {len(self.text)} characters, at most {MAX_GRAMMAR_CHARACTERS}",
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to produce.

    request_id is unique among live requests. arrived_at is a `time.monotonic()` instant.
    tenant salts the prefix cache and is never shown to the model.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stopping: StoppingParams = field(default_factory=StoppingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    structured_output: StructuredOutput | None = None
    priority: int = 0  # higher runs earlier
    tenant: str = ""
    arrived_at: float = 0.0

    def __post_init__(self) -> None:
        _require(bool(self.request_id), "request_id", "must not be empty")
        _require(bool(self.prompt_token_ids), "prompt", "must contain at least one token")
        _require(
            -100 <= self.priority <= 100,
            "priority",
            f"must be between -100 and 100, got {self.priority}",
        )
        if self.structured_output is not None:
            _require(
                not self.stopping.ignore_eos,
                "stopping.ignore_eos",
                "cannot be combined with structured output, which ends by itself",
            )
            _require(
                self.stopping.min_tokens == 0,
                "stopping.min_tokens",
                "cannot be combined with structured output, which ends by itself",
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of an emitted token, before temperature and processors.

    top holds (token_id, logprob) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The tokens that one engine step gave one request.

    first_token_index counts emitted tokens from 0, so gaps and repeats are visible.
    finish_reason is set on the last delta of a request and only there; such a delta may
    carry no tokens. stop_token_id or stop_string say what matched.
    prompt_logprobs come with the first delta when asked for, from the prompt's second token on.
    text is given only when the request has stop strings, where the engine itself must
    know the text; otherwise None and the reader detokenizes.
    """

    request_id: str
    first_token_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    error: str | None = None  # with finish_reason ERROR: what failed, without content


def validate_against_model(
    request: GenerationRequest, vocab_size: int, max_model_tokens: int
) -> None:
    """Refuse what depends on the loaded model: token ids and context length.

    Raises RequestError naming the field.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    _require(
        num_prompt_tokens < max_model_tokens,
        "prompt",
        f"has {num_prompt_tokens} tokens; the context holds {max_model_tokens}, "
        "one of them for output",
    )
    _require_ids(request.prompt_token_ids, vocab_size, "prompt")
    _require_ids(request.stopping.stop_token_ids, vocab_size, "stopping.stop_token_ids")
    _require_ids(request.sampling.allowed_token_ids, vocab_size, "sampling.allowed_token_ids")
    _require_ids(request.sampling.banned_token_ids, vocab_size, "sampling.banned_token_ids")
    _require_ids(
        tuple(token_id for token_id, _ in request.sampling.logit_bias),
        vocab_size,
        "sampling.logit_bias",
    )


def _require_ids(token_ids: tuple[int, ...], vocab_size: int, field_path: str) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(field_path, f"token id {bad} is outside the vocabulary of {vocab_size}")
