"""What an engine does with finished requests while nobody waits for it: audits, then shadows."""

import logging
import time
import zlib
from collections.abc import Generator, Sequence

from engine.assembly import Parts
from engine.audit import AuditFinding, AuditJob, AuditQueue, AuditVerdict
from engine.audit_ending import Ending
from engine.breaker import SpeculationBreaker
from engine.config import ShadowPlan
from engine.drafter.head.drafter import HeadDrafter
from engine.live_request import LiveRequest
from engine.model_runner import ModelRunner
from engine.request import FinishReason
from engine.shadow import Shadow, ShadowFinding
from engine.shards import BrokenShardsError

_logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_CHECKS = 60.0


class IdleWork:
    """Queues of finished requests. Divergences of speculative ones count towards the breaker."""

    def __init__(self, parts: Parts, breaker: SpeculationBreaker) -> None:
        self._parts = parts
        self._breaker = breaker
        self.audits = AuditQueue(parts.audit_config.max_jobs)
        self._audit: Generator[None, None, AuditFinding] | None = None  # that has begun
        self._audited_id = ""
        self._checked_at = float("-inf")
        runner = parts.verifier.runner
        self._shadow = Shadow(
            self._head,
            runner if isinstance(runner, ModelRunner) else None,
            parts.sampler,
            parts.audit_config.max_jobs,
        )

    def keep(self, live: LiveRequest, ending: Ending) -> None:
        """Queue a request that has ended, if its id is among those chosen."""
        if ending.reason is FinishReason.ERROR:
            return
        share = self._parts.audit_config.share
        has_something = live.num_output_tokens or ending.is_by_itself
        if has_something and zlib.crc32(live.request_id.encode()) < share * 2**32:
            output = tuple(live.token_ids[live.num_prompt_tokens :])
            self.audits.add(AuditJob(live.request, output, ending, live.drafter))
        if live.num_output_tokens:
            self._shadow.queue.offer(live)

    def audit_slice(self) -> tuple[AuditFinding, ...] | None:
        """A slice of the audit of a waiting request: its finding, if it was the last one; None
        where no request waits.

        What goes wrong in an audit costs its finding and nothing else. With none waiting, all
        stores are recounted once a minute; raises RuntimeError naming the first difference.
        """
        if self._audit is None:
            job = self.audits.take()
            if job is None:
                self._check_integrity(time.monotonic())
                return None
            self._audited_id = job.request.request_id
            self._audit = self._parts.auditor.slices(job)
        try:
            next(self._audit)
        except StopIteration as end:
            self._audit = None
            self._heed(end.value)
            return (end.value,)
        except BrokenShardsError:
            raise
        except Exception:
            self._audit = None
            _logger.exception("request %s could not be audited", self._audited_id)
        return ()

    def _heed(self, finding: AuditFinding) -> None:
        is_divergence = finding.verdict is AuditVerdict.DIVERGENCE
        if is_divergence:
            _logger.error(
                "request %s diverged from the target at output token %s by %s (limit %s) %s",
                finding.request_id,
                finding.first_mismatch_index,
                finding.first_margin,
                finding.epsilon,
                finding.wrong_ending,
            )
        if finding.drafter:
            self._breaker.observe(is_divergence, time.monotonic())

    def _check_integrity(self, now: float) -> None:
        if now - self._checked_at >= _SECONDS_BETWEEN_CHECKS:
            self._parts.scheduler.check_integrity()
            self._parts.drafters.check_integrity()
            self._checked_at = now

    def shadow(self, plans: Sequence[ShadowPlan]) -> None:
        """Measure these from now on."""
        self._shadow.queue.plans = tuple(plans)

    def shadow_next(self) -> tuple[ShadowFinding, ...] | None:
        """A slice of a replay: its findings, if it was the last one; None without a replay.

        What goes wrong in one costs its finding and nothing else.
        """
        try:
            return self._shadow.advance(self._parts.lengths.max_draft_tokens)
        except Exception:
            _logger.exception("a head could not be measured on a finished request")
            self._shadow.queue.give_up()
            return ()

    def interrupt(self) -> None:
        """A step comes, or a head goes: the caches are the requests' again."""
        self._shadow.interrupt()

    def _head(self, name: str) -> HeadDrafter | None:
        made = self._parts.roster.head(name)
        return None if made is None else made.drafter
