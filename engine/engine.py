"""The engine: requests in, tokens out, one step at a time.

All methods are called from one thread. A step is: end what is cancelled or out of time,
schedule, propose, verify, commit. Until commit nothing of a request has changed.

Invariants, checked by `check_integrity`:
  1. A step emits 1 to K + 1 tokens for a row that reaches its newest token; the last of
     them is the target's own.
  2. After a step the cache holds exactly num_tokens - 1 entries of a decoding request.
  3. free + cached + owned blocks = all blocks; references recount from the requests.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from engine.assembly import Parts, assemble
from engine.audit import AuditFinding, AuditJob
from engine.breaker import SpeculationBreaker
from engine.committer import Committer
from engine.config import EngineConfig, HeadSource, ShadowPlan
from engine.cost_table import CostTable
from engine.drafter.base import DraftJob, Proposal
from engine.drafter.head.assembly import ReadyHead
from engine.idle_work import IdleWork
from engine.intake import make_live
from engine.live_request import LiveRequest
from engine.loader import LoadedModel, load_model
from engine.request import (
    FinishReason,
    GenerationRequest,
    RequestError,
    StructuredOutput,
    TokenDelta,
)
from engine.scheduler import PlannedRow
from engine.shadow import ShadowFinding
from engine.stats import EngineLoad, ModelInfo, RequestStats, RowStepStats, StepStats
from engine.step import StepOutput
from engine.verifier import Verification


class Engine:
    """Batched speculative decoding over one target model."""

    def __init__(self, parts: Parts) -> None:
        self.info: ModelInfo = parts.info
        self.tokenizer = parts.tokenizer
        self._parts = parts
        self._scheduler = parts.scheduler
        self._drafters = parts.drafters
        self._verifier = parts.verifier
        self._lengths = parts.lengths
        self._to_end: dict[str, FinishReason] = {}
        self.breaker = SpeculationBreaker()
        self._idle = IdleWork(parts, self.breaker)
        self._committer = Committer(parts, on_closed=self._idle.keep)
        self._num_steps = 0
        self._last_step_at: float | None = None

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """Load the models and get ready; slow. Raises UnsupportedModelError or ValueError."""
        target = load_model(
            config.target,
            dtype=config.dtype,
            device=config.device,
            num_shards=config.tensor_parallel,
        )
        draft = None
        if "draft_model" in config.speculation.drafters:
            draft = load_model(
                config.speculation.draft_model or "", dtype=config.dtype, device=config.device
            )
        return cls.from_models(config, target, draft)

    @classmethod
    def from_models(
        cls, config: EngineConfig, target: LoadedModel, draft: LoadedModel | None = None
    ) -> "Engine":
        return cls(assemble(config, target, draft))

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises RequestError naming the field that cannot be served."""
        if self._scheduler.find(request.request_id) is not None:
            raise RequestError("request_id", f"{request.request_id!r} is already running")
        parts = self._parts
        self._scheduler.add(
            make_live(
                request,
                self.info,
                parts.tokenizer,
                parts.grammars,
                parts.sampler,
                parts.roster.known_names,
            )
        )

    def prepare(self, wanted: StructuredOutput) -> None:
        """Compile a grammar ahead of `submit`, which then finds it; from any thread.

        Raises RequestError naming the field when it cannot be used.
        """
        self._parts.grammars.compile(wanted)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request at the start of the next step; unknown ids are ignored."""
        if self._scheduler.find(request_id) is not None:
            self._to_end[request_id] = reason

    def load_head(self, source: HeadSource) -> ReadyHead:
        """A further head, to be given to `add_drafter`; slow, from any thread while steps run.

        Raises HeadFormatError naming the head and the field, too little memory included.
        """
        return self._parts.roster.load(source)

    def add_drafter(self, ready: ReadyHead) -> ModelInfo:
        """Let requests name the head from now on; running ones go on as they were."""
        self._parts.roster.add(ready)
        return self._named_anew()

    def remove_drafter(self, name: str) -> ModelInfo:
        """Offer a head no more; it goes with the last request that names it. Raises ValueError
        for a drafter that was not added by name."""
        self._idle.interrupt()
        self._parts.roster.remove(name, self._scheduler.live_requests())
        return self._named_anew()

    def _named_anew(self) -> ModelInfo:
        self.info = replace(self.info, drafters=self._parts.roster.names)
        return self.info

    def has_work(self) -> bool:
        return bool(self._scheduler.running or self._scheduler.waiting)

    def load(self) -> EngineLoad:
        pool = self._scheduler.cache.pool
        return EngineLoad(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_rows=self._scheduler.cache.max_num_rows,
            num_free_blocks=pool.num_available,
            num_total_blocks=pool.num_blocks,
            num_steps=self._num_steps,
            last_step_at=self._last_step_at,
            num_audits_waiting=len(self._idle.audits),
            num_audits_dropped=self._idle.audits.num_dropped,
        )

    def step(self) -> StepOutput:
        """Advance every request that fits the budgets; see the module's contract."""
        started_at, started = time.monotonic(), time.perf_counter_ns()
        self._idle.interrupt()
        ended = self._end_overdue(started_at)
        self._parts.roster.drop_unused(self._scheduler.live_requests())
        drafts = self._draft_lengths(started_at)
        plan = self._scheduler.schedule(started_at, drafts)
        if not plan:
            return StepOutput(tuple(d for d, _ in ended), tuple(s for _, s in ended), None)
        proposals = self._propose(plan)
        proposed = time.perf_counter_ns()
        aligned_before = self._verifier.runner.align_nanoseconds
        verification = self._verifier.verify(plan, proposals)
        align_nanoseconds = self._verifier.runner.align_nanoseconds - aligned_before
        committed = [
            self._committer.commit(outcome, proposal)
            for outcome, proposal in zip(verification.outcomes, proposals, strict=True)
        ]
        self._num_steps += 1
        self._last_step_at = time.monotonic()
        deltas = [d for d, _ in ended] + [d for d, _, _ in committed if d is not None]
        finished = [s for _, s in ended] + [s for _, s, _ in committed if s is not None]
        rows = tuple(row for _, _, row in committed)
        stats = self._step_stats(
            started_at, started, proposed, verification, align_nanoseconds, rows
        )
        self._lengths.observe_step(stats)
        return StepOutput(tuple(deltas), tuple(finished), stats)

    def audit_slice(self) -> tuple[AuditFinding, ...] | None:
        """A slice of an audit, no longer than a step: its finding, if it was the last one. None
        while there is other work, and when no finished request waits.

        A divergence of a speculative request counts towards the breaker.
        """
        if self.has_work():
            return None
        self._parts.roster.drop_unused(())
        return self._idle.audit_slice()

    def audit_next(self) -> AuditFinding | None:
        """All slices of one audit; None as in `audit_slice`."""
        while (found := self.audit_slice()) is not None:
            if found:
                return found[0]
        return None

    def shadow(self, plans: Sequence[ShadowPlan]) -> ModelInfo:
        """Measure these heads on a share of what finishes from now on; see engine/shadow.py."""
        self._idle.shadow(plans)
        return self.info

    def shadow_next(self) -> tuple[ShadowFinding, ...] | None:
        """A slice of a replay, no longer than a step; call it when there is no other work. None
        when none waits."""
        return self._idle.shadow_next()

    @property
    def target_costs(self) -> CostTable:
        """What a forward of the target costs, as measured at start."""
        return self._parts.lengths.costs.target

    def audit(self, job: AuditJob) -> AuditFinding:
        """Audit this request now, whatever waits; the breaker does not learn from it."""
        return self._parts.auditor.audit(job)

    # ---- the parts of a step ----------------------------------------------------------

    def _draft_lengths(self, now: float) -> dict[str, int]:
        rows, num_other_tokens = self._scheduler.outlook(self._lengths.expected_tokens)
        if not self.breaker.allows_speculation(now):
            return {}
        return self._lengths.choose(rows, num_other_tokens)

    def _end_overdue(self, now: float) -> list[tuple[TokenDelta, RequestStats]]:
        to_end, self._to_end = self._to_end, {}
        for live in self._scheduler.live_requests():
            limit = live.request.stopping.time_limit_seconds
            if limit is not None and now - live.request.arrived_at >= limit:
                to_end.setdefault(live.request_id, FinishReason.TIME_LIMIT)
        ended = []
        for request_id, reason in to_end.items():
            found = self._scheduler.find(request_id)
            if found is not None:
                ended.append(self._committer.finish(found, reason))
        return ended

    def _propose(self, plan: Sequence[PlannedRow]) -> list[Proposal]:
        jobs = [
            DraftJob(p.live, p.start + p.num_tokens, p.max_drafts, self._lengths.min_reach(p.live))
            for p in plan
        ]
        proposals = [
            _legal(planned.live, proposal)
            for planned, proposal in zip(plan, self._drafters.propose(jobs), strict=True)
        ]
        for planned, proposal in zip(plan, proposals, strict=True):
            planned.live.num_drafter_positions += proposal.num_positions
            if proposal.token_ids:
                planned.live.drafter = proposal.drafter
        return proposals

    def _step_stats(
        self,
        started_at: float,
        started: int,
        proposed: int,
        verification: Verification,
        align_nanoseconds: int,
        rows: tuple[RowStepStats, ...],
    ) -> StepStats:
        pool = self._scheduler.cache.pool
        return StepStats(
            step_index=self._num_steps - 1,
            started_at=started_at,
            duration_nanoseconds=time.perf_counter_ns() - started,
            propose_nanoseconds=proposed - started,
            verify_nanoseconds=max(0, verification.verify_nanoseconds - align_nanoseconds),
            align_nanoseconds=align_nanoseconds,
            sample_nanoseconds=verification.sample_nanoseconds,
            rows=rows,
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_free_blocks=pool.num_available,
            num_total_blocks=pool.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_audits_dropped=self._idle.audits.num_dropped,
            drafter_events=self._drafters.take_events(),
            preempted_request_ids=self._scheduler.take_preempted(),
        )

    def check_integrity(self) -> None:
        """Recount everything; raises RuntimeError naming the first difference. When idle."""
        self._scheduler.check_integrity()
        self._drafters.check_integrity()


def _legal(live: LiveRequest, proposal: Proposal) -> Proposal:
    """The proposal up to the first token that the request's grammar forbids."""
    if live.grammar is None or not proposal.token_ids:
        return proposal
    num_legal = live.grammar.legal_prefix(proposal.token_ids)
    probs = proposal.draft_probs
    return replace(
        proposal,
        token_ids=proposal.token_ids[:num_legal],
        draft_probs=probs[:num_legal] if probs is not None and num_legal else None,
    )
