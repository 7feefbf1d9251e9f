"""A request while it is in the engine: its tokens, its place and its counters."""

from dataclasses import dataclass, field

from engine.grammar import Grammar
from engine.request import FinishReason, GenerationRequest, SpeculationMode, TokenLogprob
from engine.sampler import TokenHistory
from engine.stats import RequestStats
from engine.stop_strings import StopStringWatcher


@dataclass(slots=True)
class LiveRequest:
    """The engine's one mutable record of a request.

    token_ids are prompt and output. num_computed_tokens counts those whose keys are in the
    target's cache: it catches up with len(token_ids), and the newest token of a decoding
    request is the one still to compute. row is None while waiting.
    """

    request: GenerationRequest
    token_ids: list[int]
    row: int | None = None
    num_computed_tokens: int = 0
    history: TokenHistory | None = None
    grammar: Grammar | None = None
    watcher: StopStringWatcher | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    guarded_token_ids: tuple[int, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()

    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached_prompt_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_ever_computed_tokens: int = 0
    num_prefill_positions: int = 0
    num_steps: int = 0
    num_plain_steps: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_accepted_tokens: int = 0
    num_cut_tokens: int = 0
    num_drafter_positions: int = 0
    num_preemptions: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    accepted_per_length: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)
    drafter: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_decoding(self) -> bool:
        """Only the newest token is still to compute, and it is not the prompt's last."""
        num_tokens = len(self.token_ids)
        return self.num_computed_tokens == num_tokens - 1 and num_tokens > self.num_prompt_tokens

    @property
    def num_missing_prompt_logprobs(self) -> int:
        """Of the prompt's tokens from the second on, those whose logprob is still to come."""
        if not self.request.sampling.prompt_logprobs:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    @property
    def cache_salt(self) -> str:
        """Requests share prefixes only under the same salt. One that wants the logprobs of
        its prompt must compute all of it, so its salt is its own."""
        if self.request.sampling.prompt_logprobs:
            return f"{self.request.tenant}\0{self.request_id}"
        return self.request.tenant

    @property
    def speculates(self) -> bool:
        return self.request.speculation.mode is not SpeculationMode.OFF

    def count_verification(self, num_drafts: int, num_accepted: int, num_emitted: int) -> None:
        """Book one step that emitted tokens; num_emitted is what was left after a stop."""
        if num_drafts == 0:
            self.num_plain_steps += 1
            return
        self.num_verify_steps += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        self.num_emitted_accepted_tokens += min(num_accepted, num_emitted)
        self.num_cut_tokens += int(num_emitted <= num_accepted)
        for counts, count in (
            (self.drafted_per_position, num_drafts),
            (self.accepted_per_position, num_accepted),
        ):
            counts.extend([0] * (num_drafts - len(counts)))
            for position in range(count):
                counts[position] += 1
        missing = len(self.drafted_per_position) - len(self.accepted_per_length)
        self.accepted_per_length.extend([0] * missing)
        self.accepted_per_length[num_drafts - 1] += num_accepted
        missing = num_accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram.extend([0] * missing)
        self.acceptance_histogram[num_accepted] += 1

    def stats(
        self, finish_reason: FinishReason, finished_at: float, error: str | None = None
    ) -> RequestStats:
        request = self.request
        return RequestStats(
            request_id=request.request_id,
            finish_reason=finish_reason,
            arrived_at=request.arrived_at,
            first_scheduled_at=self.first_scheduled_at,
            first_token_at=self.first_token_at,
            last_token_at=self.last_token_at,
            finished_at=finished_at,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_prompt_tokens=self.num_cached_prompt_tokens,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_output_tokens=self.num_output_tokens,
            num_prefill_positions=self.num_prefill_positions,
            num_steps=self.num_steps,
            num_plain_steps=self.num_plain_steps,
            num_verify_steps=self.num_verify_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_emitted_accepted_tokens=self.num_emitted_accepted_tokens,
            num_cut_tokens=self.num_cut_tokens,
            num_drafter_positions=self.num_drafter_positions,
            num_preemptions=self.num_preemptions,
            drafted_per_position=tuple(self.drafted_per_position),
            accepted_per_position=tuple(self.accepted_per_position),
            accepted_per_length=tuple(self.accepted_per_length),
            acceptance_histogram=tuple(self.acceptance_histogram),
            drafter=self.drafter,
            seed=request.sampling.seed,
            error=error,
        )
