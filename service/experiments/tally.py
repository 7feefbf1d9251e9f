"""Counts what an experiment's requests were like, as they are read from the ledger."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from service.experiments.guard_rails import ArmCounts, Evidence
from service.experiments.sequential import BoundedMean, Interval
from service.experiments.specification import Experiment
from service.experiments.switchback import figures_by_slot, pair_differences

_MAX_SLOT_VALUES = 20_000
_MAX_OPEN_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Observation:
    """A finished request. at: its arrival, Unix seconds. unit: the request, or its tenant.

    accepted_per_step: accepted tokens over steps that gave tokens, None when it had none.
    seconds_per_token: between tokens, None when there were fewer than two.
    """

    variant: str
    unit: str
    at: float
    is_failed: bool
    accepted_per_step: float | None
    seconds_per_token: float | None


@dataclass(slots=True)
class _Tenant:
    num: int = 0
    total: float = 0.0
    has_failed: bool = False


@dataclass(slots=True)
class _Arm:
    mean: BoundedMean
    num_requests: int = 0
    num_failures: int = 0
    num_divergences: int = 0
    tenants: dict[str, _Tenant] = field(default_factory=dict)


class Tally:
    """Everything that the guard rails of one experiment need to know.

    While a candidate has no share (the other slots) requests count for latency alone: without a
    draw between the arms they are no comparison. Where tenants keep their variant, a tenant is
    one draw, so its first requests_per_tenant requests make one observation, and of its failures
    the first one counts.
    """

    def __init__(self, experiment: Experiment, *, max_draft_tokens: int) -> None:
        """max_draft_tokens: the server's, of variants that state none."""
        self.experiment = experiment
        rails, slots = experiment.guard_rails, experiment.slots
        self._alpha = rails.alpha_per_test(
            num_candidates=len(experiment.candidates), has_slots=slots is not None
        )
        self._slots = slots
        # The interval of a difference holds when those of both its arms do.
        self._arms = {v.name: _Arm(BoundedMean(self._alpha / 2)) for v in experiment.variants}
        self._highest = float(
            max(1, *(v.max_draft_tokens or max_draft_tokens for v in experiment.variants))
        )
        self._latencies: dict[int, list[tuple[float, float]]] = {}
        self._means: dict[int, float] = {}
        self._p99s: dict[int, float] = {}

    @property
    def alpha_per_test(self) -> float:
        return self._alpha

    def add(self, observation: Observation) -> None:
        """Ignores a variant that the experiment does not have, and what came before its start."""
        arm = self._arms.get(observation.variant)
        if arm is None or observation.at < self.experiment.started_at.timestamp():
            return
        if self._slots is not None:
            self._add_latency(observation)
            if not self._slots.has_candidate(self._slots.index_of(observation.at)):
                return
        arm.num_requests += 1
        if self.experiment.unit == "tenant":
            self._add_of_tenant(arm, observation)
            return
        arm.num_failures += observation.is_failed
        if observation.accepted_per_step is not None:
            arm.mean.add(self._scaled(observation.accepted_per_step))

    def add_divergence(self, variant: str) -> None:
        """The auditor found that a request's output was not the target's."""
        if variant in self._arms:
            self._arms[variant].num_divergences += 1

    def evidence(self, candidate: str, now: float) -> Evidence:
        """Of a candidate against the control. now: Unix seconds; running slots do not count."""
        self._close_slots(now)
        weights = self.experiment.weights
        control = self.experiment.control.name
        share = weights[candidate] / ((weights[candidate] + weights[control]) or 1)
        differences: list[list[float] | None] = [None, None]
        if self._slots is not None:
            before = self._slots.index_of(now)
            differences = [
                pair_differences(figures, self._slots, before=before)
                for figures in (self._means, self._p99s)
            ]
        return Evidence(
            candidate=self._counts(candidate),
            control=self._counts(control),
            candidate_share=min(max(share, 1e-6), 1 - 1e-6),
            slowdowns=differences[0],
            p99_increases=differences[1],
        )

    def counts(self) -> Mapping[str, ArmCounts]:
        return {name: self._counts(name) for name in self._arms}

    def _counts(self, name: str) -> ArmCounts:
        arm = self._arms[name]
        interval = None
        if arm.mean.num_values >= self.experiment.guard_rails.min_units:
            found = arm.mean.interval
            interval = Interval(
                *(1 + self._highest * v for v in (found.estimate, found.lower, found.upper))
            )
        return ArmCounts(
            arm.num_requests, arm.mean.num_values, arm.num_failures, arm.num_divergences, interval
        )

    def _scaled(self, accepted_per_step: float) -> float:
        return min(max(accepted_per_step / self._highest, 0.0), 1.0)

    def _add_of_tenant(self, arm: _Arm, observation: Observation) -> None:
        tenant = arm.tenants.setdefault(observation.unit, _Tenant())
        if observation.is_failed and not tenant.has_failed:
            tenant.has_failed = True
            arm.num_failures += 1
        wanted = self.experiment.guard_rails.requests_per_tenant
        if observation.accepted_per_step is None or tenant.num >= wanted:
            return
        tenant.num += 1
        tenant.total += self._scaled(observation.accepted_per_step)
        if tenant.num == wanted:
            arm.mean.add(tenant.total / wanted)

    def _add_latency(self, observation: Observation) -> None:
        if self._slots is None or observation.seconds_per_token is None:
            return
        index = self._slots.index_of(observation.at)
        if index in self._means:
            return  # a latecomer of a slot that is closed
        if len(self._latencies) > _MAX_OPEN_SLOTS:  # a long past that is read at once
            self._close_slots(observation.at - _MAX_OPEN_SLOTS / 2 * self._slots.slot_seconds)
        values = self._latencies.setdefault(index, [])
        if len(values) < _MAX_SLOT_VALUES:
            values.append((observation.at, observation.seconds_per_token))

    def _close_slots(self, now: float) -> None:
        """Keep two figures of each slot that has ended for a slot's length, not its values."""
        if self._slots is None:
            return
        open_from = self._slots.index_of(now) - 1
        for index in [index for index in self._latencies if index < open_from]:
            values = self._latencies.pop(index)
            least = self.experiment.guard_rails.min_slot_requests
            for figures, quantile in ((self._means, None), (self._p99s, 0.99)):
                figures.update(
                    figures_by_slot(values, self._slots, quantile=quantile, min_observations=least)
                )
            self._means.setdefault(index, 0.0)  # closed, without a figure
