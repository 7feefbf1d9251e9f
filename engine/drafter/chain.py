"""The drafters in their order of preference: the first that proposes for a row wins.

A drafter that raises is switched off and named in `failures`; its rows go on without it,
because a proposal is never worth a request.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

from engine.drafter.base import NO_PROPOSAL, Drafter, DraftJob, ForwardListener, Proposal
from engine.layout.plan import ForwardRow
from engine.live_request import LiveRequest

_logger = logging.getLogger(__name__)


class DrafterChain:
    """All drafters of an engine; those of by_name_only draft for requests that name them."""

    def __init__(self, drafters: Sequence[Drafter], by_name_only: Sequence[Drafter] = ()) -> None:
        self._drafters = [*drafters, *by_name_only]
        self._by_name_only = frozenset(drafter.name for drafter in by_name_only)
        self._listeners: list[tuple[str, ForwardListener]] = [
            (d.name, d) for d in self._drafters if isinstance(d, ForwardListener)
        ]
        self.failures: dict[str, str] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self._drafters)

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        proposals = [NO_PROPOSAL] * len(jobs)
        for drafter in self._drafters:
            open_jobs = [
                index
                for index, job in enumerate(jobs)
                if not proposals[index].token_ids and self._may_use(job, drafter)
            ]
            if not open_jobs or drafter.name in self.failures:
                continue
            try:
                found = drafter.propose([jobs[index] for index in open_jobs])
            except Exception as error:
                self.failures[drafter.name] = f"{type(error).__name__}: {error}"
                _logger.exception("drafter %s failed and is switched off", drafter.name)
                continue
            for index, proposal in zip(open_jobs, found, strict=True):
                spent = proposals[index].num_positions + proposal.num_positions
                proposals[index] = replace(proposal, num_positions=spent)
        return proposals

    def after_forward(self, rows: Sequence[tuple[LiveRequest, ForwardRow]]) -> None:
        """Let the drafters that read the target's states have those of a forward."""
        for name, listener in self._listeners:
            if name in self.failures:
                continue
            try:
                listener.after_forward(rows)
            except Exception as error:
                self.failures[name] = f"{type(error).__name__}: {error}"
                _logger.exception("drafter %s failed and is switched off", name)

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)

    def check_integrity(self) -> None:
        for drafter in self._drafters:
            drafter.check_integrity()

    def _may_use(self, job: DraftJob, drafter: Drafter) -> bool:
        named = job.live.request.speculation.named_drafters
        if named is None:
            return job.live.speculates and drafter.name not in self._by_name_only
        return job.live.speculates and drafter.name in named
