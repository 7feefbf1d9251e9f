"""The experiment that a server runs: read, assigned by, rolled back."""

import logging
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from engine.request import SpeculationMode
from service.experiments.assignment import assign
from service.experiments.heads import DrafterNames
from service.experiments.records import RollbackRecord, RollbackStore
from service.experiments.specification import Experiment, ExperimentError, read_experiment
from service.orders import GenerationOrder

_log = logging.getLogger(__name__)
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Assigned:
    """An order as it will be run. variant is "" outside of any experiment."""

    order: GenerationOrder
    variant: str = ""


class LiveExperiments:
    """At most one experiment at a time. Used on the event loop alone.

    path: the experiment's file, None where no experiment shall ever run; a file that is not
    there is no experiment either, so that removing it ends one.
    """

    def __init__(self, path: Path | None, store: RollbackStore, max_draft_tokens: int) -> None:
        self._path = path
        self._store = store
        self._max_draft_tokens = max_draft_tokens
        self._names = DrafterNames()
        self._read: Experiment | None = None
        self._running: Experiment | None = None
        self._share: float | None = None
        self._variants: OrderedDict[str, str] = OrderedDict()

    @property
    def running(self) -> Experiment | None:
        """As it is assigned by: without what was rolled back."""
        return self._running

    @property
    def as_read(self) -> Experiment | None:
        return self._read

    @property
    def names(self) -> DrafterNames:
        """What the names of drafters stand for now."""
        return self._names

    @property
    def variants(self) -> tuple[str, ...]:
        if self._running is None:
            return ()
        return tuple(v.name for v in self._running.variants if v.weight > 0)

    def read(self) -> Experiment | None:
        """The file as it is now. Raises ExperimentError or OSError."""
        if self._path is None or not self._path.exists():
            return None
        return read_experiment(self._path)

    def check(self, found: Experiment | None, drafters: Collection[str]) -> None:
        """Whether it can follow what runs, on a server with these drafters: ExperimentError."""
        if found is not None:
            self._check(found, drafters)

    def take(self, found: Experiment | None, names: DrafterNames) -> None:
        """Assign by it from now on. Raises OSError or ValueError for rollbacks that cannot be
        read, and changes nothing then."""
        running = None if found is None else self._without_rolled_back(found)
        is_same = found is not None and found == self._read
        self._read, self._running, self._names = found, running, names
        self._share = self._share if is_same else None
        self._share_out()

    def assign(self, order: GenerationOrder, tenant: str, now: float) -> Assigned:
        """now: Unix seconds. A client that chooses its drafters, or none, is in no experiment."""
        experiment, wanted = self._running, order.speculation
        chooses = wanted.named_drafters is not None or wanted.mode is SpeculationMode.OFF
        if experiment is None or chooses:
            return Assigned(replace(order, speculation=self._names.resolved(wanted)))
        unit = tenant if experiment.unit == "tenant" and tenant else order.request_id
        variant = experiment.control
        slots = experiment.slots
        if slots is None or slots.has_candidate(slots.index_of(now)):
            name = assign(experiment.hash_key, unit, experiment.weights)
            variant = next(v for v in experiment.variants if v.name == name)
        if not variant.drafters:
            speculation = replace(wanted, mode=SpeculationMode.OFF)
        else:
            limits = (wanted.max_draft_tokens, variant.max_draft_tokens)
            known = [limit for limit in limits if limit is not None]
            speculation = replace(
                wanted,
                drafters=variant.drafters,
                max_draft_tokens=min(known) if known else None,
            )
        self._remember(order.request_id, variant.name)
        resolved = self._names.resolved(speculation)
        return Assigned(replace(order, speculation=resolved), variant.name)

    def variant_of(self, request_id: str) -> str:
        """Of a request that was assigned not too long ago, its further completions included."""
        return self._variants.get(request_id.partition("#")[0], "")

    def roll_back(self, record: RollbackRecord) -> None:
        """Give the candidate's share to the control, now and after a restart; a promotion ends
        an experiment the same way."""
        self._store.add(record)
        self._share_out()
        if record.is_promoted:
            _log.warning(
                "experiment %s: candidate %s is promoted: %s",
                record.experiment, record.variant, record.rule,
            )  # fmt: skip
            return
        _log.error(
            "experiment %s: candidate %s is rolled back: %s",
            record.experiment, record.variant, record.rule,
        )  # fmt: skip

    def set_share(self, share: float, of: Experiment) -> None:
        """Of the one candidate of the experiment `of`, from now on, unless another one has been
        read meanwhile; see service/experiments/canary.py."""
        if of == self._read and share != self._share:
            self._share = share
            self._share_out()

    def _share_out(self) -> None:
        if self._read is not None:
            shared = self._read if self._share is None else self._read.with_share(self._share)
            self._running = self._without_rolled_back(shared)

    def _without_rolled_back(self, experiment: Experiment) -> Experiment:
        return experiment.without(self._store.rolled_back(experiment))

    def _check(self, found: Experiment, drafters: Collection[str]) -> None:
        for variant in found.variants:
            for name in variant.drafters:
                if name not in drafters:
                    raise ExperimentError(
                        f"variant {variant.name}.drafters: unknown drafter {name!r}; this server "
                        f"has {sorted(drafters)}"
                    )
            limit = variant.max_draft_tokens
            if limit is not None and limit > self._max_draft_tokens:
                raise ExperimentError(
                    f"variant {variant.name}.max_draft_tokens: {limit} is more than the server's "
                    f"{self._max_draft_tokens}"
                )
        before = self._read
        if (
            before is not None
            and (before.name, before.started_at) == (found.name, found.started_at)
            and replace(before, shadows=found.shadows, guard_rails=found.guard_rails) != found
        ):
            raise ExperimentError(
                "started_at: must be moved when anything but rails and shadows changes; "
                "what was observed before is no evidence of what runs then"
            )

    def _remember(self, request_id: str, variant: str) -> None:
        self._variants[request_id] = variant
        if len(self._variants) > _MAX_REMEMBERED:
            self._variants.popitem(last=False)


def no_experiments() -> LiveExperiments:
    """Every order as it is."""
    return LiveExperiments(None, RollbackStore(Path()), 0)
