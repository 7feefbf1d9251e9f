"""Keeps a running server's heads and its experiment as the registry and the file say.

Everything or nothing: what is wrong with one head, or with the experiment, leaves all as it was.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Protocol

from engine.config import HeadSource, ShadowPlan
from engine.stats import ModelInfo
from service.experiments.heads import DrafterNames, RegisteredHeads
from service.experiments.live import LiveExperiments
from service.experiments.specification import Experiment

_log = logging.getLogger(__name__)


class HeadHost(Protocol):
    """Whose heads these are: an engine's thread."""

    async def add_head(self, source: HeadSource) -> ModelInfo: ...
    async def remove_drafter(self, name: str) -> ModelInfo: ...
    async def shadow(self, plans: Sequence[ShadowPlan]) -> ModelInfo: ...


class DrafterReload:
    """Used on the event loop. on_change is given what clients see, whenever it is another.

    interval_seconds: how often the registry is asked whether a name stands for another version.
    """

    def __init__(
        self,
        host: HeadHost,
        heads: RegisteredHeads,
        experiments: LiveExperiments,
        on_change: Callable[[ModelInfo], None],
        interval_seconds: float,
    ) -> None:
        self._host = host
        self._heads = heads
        self._experiments = experiments
        self._on_change = on_change
        self._interval_seconds = interval_seconds
        self._info: ModelInfo | None = None
        self._own: frozenset[str] = frozenset()
        self._loaded: frozenset[str] = frozenset()
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, info: ModelInfo) -> None:
        """Once the engine runs. Raises ExperimentError, RegistryError, HeadFormatError, OSError."""
        self._info, self._own = info, frozenset(info.drafters)
        await self.reload()
        self._start(self._follow())

    def request(self) -> None:
        """Reload soon; what is wrong is logged and changes nothing."""
        if self._info is not None:
            self._start(self._reload_and_tell())

    async def stop(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def reload(self) -> None:
        """Take over the registry and the experiment's file. Raises what `open` raises, and
        changes nothing then."""
        async with self._lock:
            experiment = self._experiments.read()
            drafters = [] if experiment is None else experiment.drafters
            wanted = await asyncio.to_thread(self._heads.wanted, drafters, self._own)
            names = wanted.names
            self._experiments.check(experiment, self._own.union(names.versions))
            added: list[str] = []
            try:
                for name, source in wanted.sources.items():
                    if name not in self._loaded:
                        self._info = await self._host.add_head(source)
                        added.append(name)
                        _log.info("loaded the head %s", name)
                self._warn_of_moved(experiment, names)
                self._experiments.take(experiment, names)
            except BaseException:
                await self._remove(added)
                raise
            leaving = self._loaded - wanted.sources.keys()
            self._loaded = frozenset(wanted.sources)
            self._tell(names, leaving)
            await self._shadow(experiment, names)
            await self._remove(leaving)

    def _warn_of_moved(self, experiment: Experiment | None, names: DrafterNames) -> None:
        """Somebody promoted or rolled back what an experiment compares, while it runs."""
        running, before = self._experiments.running, self._experiments.names.versions
        if experiment is None or running is None or experiment != self._experiments.as_read:
            return
        if not any(candidate.weight for candidate in running.candidates):
            return
        for name in experiment.drafters:
            if before.get(name, names.versions.get(name)) != names.versions.get(name):
                _log.warning(
                    "experiment %s: %s is another version now, so that what was observed is no "
                    "evidence any more; give it a new started_at", experiment.name, name,
                )  # fmt: skip

    async def _shadow(self, experiment: Experiment | None, names: DrafterNames) -> None:
        plans: list[ShadowPlan] = []
        if experiment is not None:
            baseline = experiment.baseline
            for shadow in experiment.shadows:
                wanted = [shadow.drafter] if baseline is None else [shadow.drafter, baseline]
                found = dict.fromkeys(names.versions.get(name, name) for name in wanted)
                plans.append(ShadowPlan(tuple(found), shadow.share))
        await self._host.shadow(plans)

    async def _remove(self, names: Collection[str]) -> None:
        for name in names:
            self._info = await self._host.remove_drafter(name)
            _log.info("the head %s goes with the last request that uses it", name)

    def _tell(self, names: DrafterNames, leaving: Collection[str]) -> None:
        if self._info is not None:
            known = dict.fromkeys((*self._info.drafters, *names.all))
            drafters = tuple(name for name in known if name not in leaving)
            self._on_change(replace(self._info, drafters=drafters))

    async def _reload_and_tell(self) -> None:
        try:
            await self.reload()
        except (OSError, ValueError) as error:
            _log.error("experiment and heads not reloaded: %s", error)
        except Exception:
            _log.exception("experiment and heads not reloaded")
        else:
            _log.info("experiment and heads reloaded")

    async def _follow(self) -> None:
        """New requests get the version that was promoted, whoever promoted it."""
        refused: DrafterNames | None = None
        while True:
            await asyncio.sleep(self._interval_seconds)
            experiment = self._experiments.as_read
            drafters = [] if experiment is None else experiment.drafters
            try:
                found = await asyncio.to_thread(self._heads.wanted, drafters, self._own)
            except (OSError, ValueError) as error:
                _log.warning("the registry was not looked at: %s", error)
                continue
            if found.names not in (self._experiments.names, refused):
                refused = found.names  # once is enough to say why not
                await self._reload_and_tell()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
