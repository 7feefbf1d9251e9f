"""Traffic for experiments: arms of known acceptance, failures and latency, request by request."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from service.experiments.assignment import assign
from service.experiments.guard_rails import Action, Decision, GuardRails, judge
from service.experiments.specification import Experiment, Unit, Variant
from service.experiments.tally import Observation, Tally

STARTED_AT = datetime(2026, 11, 30, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Truth:
    """What a candidate really does, relative to the control."""

    acceptance: float = 1.0
    failure_rate: float = 0.0
    latency: float = 1.0


def experiment(
    *,
    weight: float = 0.5,
    unit: Unit = "request",
    slot_seconds: float | None = None,
    rails: GuardRails | None = None,
    key: str = "key",
) -> Experiment:
    return Experiment(
        name="trial",
        started_at=STARTED_AT,
        variants=(
            Variant("control", ("old",), 1 - weight),
            Variant("candidate", ("new",), weight),
        ),
        unit=unit,
        key=key,
        slot_seconds=slot_seconds,
        washout_seconds=0.0,
        guard_rails=rails or GuardRails(),
    )


def traffic(
    of: Experiment,
    candidate: Truth,
    control: Truth,
    *,
    num_requests: int,
    seed: int,
    seconds_between: float = 1.0,
    num_tenants: int = 1,
) -> Iterator[Observation]:
    """Requests whose acceptance also depends on their tenant, and whose latency on the hour and
    on what the batch of the slot holds, not on their own arm."""
    rng = random.Random(seed)
    tenants = [rng.gauss(1.0, 0.2) for _ in range(num_tenants)]
    for index in range(num_requests):
        at = STARTED_AT.timestamp() + index * seconds_between
        tenant = rng.randrange(num_tenants)
        unit = f"tenant-{tenant}" if of.unit == "tenant" else f"request-{index}"
        slots = of.slots
        is_on = slots is None or slots.has_candidate(slots.index_of(at))
        variant = assign(of.hash_key, unit, of.weights) if is_on else "control"
        arm = candidate if variant == "candidate" else control
        accepted = 1.2 * arm.acceptance * tenants[tenant] + rng.gauss(0, 0.4)
        busy = candidate.latency if slots is not None and is_on else 1.0
        yield Observation(
            variant=variant,
            unit=unit,
            at=at,
            is_failed=rng.random() < arm.failure_rate,
            accepted_per_step=min(max(accepted, 0.0), 4.0),
            seconds_per_token=0.02 * busy * (1 + 0.1 * (index % 7)) * rng.lognormvariate(0, 0.2),
        )


def run(of: Experiment, observations: Iterator[Observation], *, look_every: int = 20) -> Decision:
    """Judge again and again, as a server does; the first decision, or the last one."""
    tally = Tally(of, max_draft_tokens=4)
    decision = None
    for number, observation in enumerate(observations, start=1):
        tally.add(observation)
        if number % look_every == 0:
            evidence = tally.evidence("candidate", now=observation.at)
            decision = judge(evidence, of.guard_rails, tally.alpha_per_test)
            if decision.action is not Action.CONTINUE:
                return decision
    assert decision is not None
    return decision
