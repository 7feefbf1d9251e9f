"""Makes an experiment's candidate the version that its name stands for: once, whoever finds it.

Every server of an experiment comes to the same decision. The registry keeps the name of the
experiment's start with the promotion, so that one of them promotes and a rollback by people is
not undone by a server that finds the same evidence again.
"""

from collections.abc import Mapping
from typing import Any

from engine.drafter.registry import HeadRegistry, Pointer
from service.experiments.guard_rails import Decision
from service.experiments.heads import reference_of
from service.experiments.specification import Experiment


def promote_candidate(
    registry: HeadRegistry, experiment: Experiment, decision: Decision
) -> Pointer:
    """The pointer of the candidate's name afterwards. Raises RegistryError or OSError."""
    reference = reference_of(experiment.promoted_head)
    assert reference is not None  # noqa: S101 - the specification has checked it
    name, _, version = reference.partition("@")
    start = f"{experiment.name} {experiment.started_at.isoformat()}"
    return registry.promote(name, version, reason=_reason(start, decision), once=start)


def _reason(start: str, decision: Decision) -> Mapping[str, Any]:
    """The live evidence, in the place of a replay's."""
    findings = {finding.rail: finding.detail for finding in decision.findings if finding.detail}
    return {"experiment": start, "rule": decision.rule, "findings": findings}
