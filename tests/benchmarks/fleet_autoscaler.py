"""The HorizontalPodAutoscaler of the manifests, in simulated time."""

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import simpy
import yaml

from tests.benchmarks.fleet_model import Fleet

SYNC_SECONDS = 15.0  # --horizontal-pod-autoscaler-sync-period
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
GOODPUT_SECONDS = 120.0  # k8s/components/monitoring/recording.yaml looks at two minutes


@dataclass(frozen=True, slots=True)
class Policy:
    """What k8s/base/scale.yaml says. Steps are (pods, share of the pods, per seconds)."""

    min_replicas: int
    max_replicas: int
    waiting_target: float
    rows_target: float
    goodput_target: float  # a share of the best
    up_window_seconds: float
    up_pods: int
    up_share: float
    up_period_seconds: float
    down_window_seconds: float
    down_pods: int
    down_period_seconds: float


def read_policy(path: Path, max_replicas: int | None = None) -> Policy:
    """The policy of a manifest; `max_replicas` for a fleet that is larger than its example."""
    spec = yaml.safe_load(path.read_text())["spec"]
    targets = {
        metric["pods"]["metric"]["name"]: _number(metric["pods"]["target"]["averageValue"])
        for metric in spec["metrics"]
    }
    up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
    by_kind: dict[str, Any] = {step["type"]: step for step in up["policies"]}
    [down_step] = down["policies"]
    return Policy(
        spec["minReplicas"],
        max_replicas or spec["maxReplicas"],
        targets["tandem_queue_depth"],
        targets["tandem_rows"],
        targets["tandem_goodput_share"],
        up["stabilizationWindowSeconds"],
        by_kind["Pods"]["value"],
        by_kind["Percent"]["value"] / 100,
        by_kind["Pods"]["periodSeconds"],
        down["stabilizationWindowSeconds"],
        down_step["value"],
        down_step["periodSeconds"],
    )


def _number(quantity: str) -> float:
    """A Kubernetes quantity without a unit, or in thousandths."""
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the autoscaler saw and has after it."""

    at: float
    num_ready: int
    num_replicas: int
    num_waiting: int
    num_rows: int


class Autoscaler:
    """Looks every 15 seconds and changes the fleet; `readings` keeps what it saw."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self._fleet, self._policy = fleet, policy
        self._wishes: deque[tuple[float, int]] = deque()
        self._changes: deque[tuple[float, int]] = deque()
        self._emitted: deque[tuple[float, float]] = deque()
        self.readings: list[Reading] = []
        fleet.env.process(self._run())

    def _run(self) -> simpy.events.ProcessGenerator:
        env = self._fleet.env
        while True:
            self._fleet.bury()
            ready, current = self._fleet.ready(), len(self._fleet.wanted())
            num_waiting = sum(len(replica.waiting) for replica in ready)
            num_rows = sum(replica.num_rows for replica in ready)
            goodput = self._goodput_share(len(ready))
            wish = self._wish(len(ready), current, num_waiting, num_rows, goodput)
            target = self._allowed(current, self._steady(current, wish))
            if target > current:
                self._fleet.grow(target - current, env.now + self._fleet.shape.start_seconds)
            elif target < current:
                self._fleet.shrink(current - target)
            if target != current:
                self._changes.append((env.now, target - current))
            self.readings.append(
                Reading(env.now, len(ready), len(self._fleet.replicas), num_waiting, num_rows)
            )
            yield env.timeout(SYNC_SECONDS)

    def _goodput_share(self, num_ready: int) -> float:
        """Of the mean replica over the last two minutes, as a share of the best there can be."""
        now = self._fleet.env.now
        self._emitted.append((now, self._fleet.num_emitted()))
        while self._emitted[0][0] < now - GOODPUT_SECONDS:
            self._emitted.popleft()
        (since, before), (_, emitted) = self._emitted[0], self._emitted[-1]
        best = self._fleet.shape.best_tokens_per_second()
        return (emitted - before) / max(now - since, SYNC_SECONDS) / max(num_ready, 1) / best

    def _wish(
        self, num_ready: int, current: int, num_waiting: int, num_rows: int, goodput: float
    ) -> int:
        # A pod that is not ready yet counts as one without load.
        policy, ready = self._policy, max(num_ready, 1)
        ratio = max(
            num_waiting / ready / policy.waiting_target,
            num_rows / ready / policy.rows_target,
            goodput / policy.goodput_target,
        )
        if ratio > 1 and current > num_ready:
            ratio = max(1.0, ratio * num_ready / current)
        if abs(ratio - 1) <= TOLERANCE:
            return current
        wish = math.ceil(ratio * (current if ratio > 1 else num_ready))
        return min(max(wish, policy.min_replicas), policy.max_replicas)

    def _steady(self, current: int, wish: int) -> int:
        now, policy = self._fleet.env.now, self._policy
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - policy.down_window_seconds:
            self._wishes.popleft()
        recent = [w for at, w in self._wishes if at >= now - policy.up_window_seconds]
        up, down = min(recent), max(w for _, w in self._wishes)
        return max(up, current) if up > current else min(down, current)

    def _allowed(self, current: int, wish: int) -> int:
        now, policy = self._fleet.env.now, self._policy
        if wish > current:
            added = self._changed(now - policy.up_period_seconds, sign=1)
            base = current - added
            return min(wish, base + max(policy.up_pods, math.ceil(base * policy.up_share)))
        removed = self._changed(now - policy.down_period_seconds, sign=-1)
        return max(wish, current - max(policy.down_pods - removed, 0))

    def _changed(self, since: float, sign: int) -> int:
        return sum(abs(n) for at, n in self._changes if at > since and n * sign > 0)
