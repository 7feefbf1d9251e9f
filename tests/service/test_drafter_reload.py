"""Heads and experiment are taken over together or not at all, and names follow the registry."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import HeadSource, ShadowPlan
from engine.drafter.registry import HeadRegistry, RegistryError
from engine.stats import ModelInfo
from service.drafter_reload import DrafterReload
from service.experiments.heads import RegisteredHeads
from service.experiments.live import LiveExperiments
from service.experiments.records import RollbackStore
from tests.fakes import FAKE_INFO

FILE = """
name = "trial"
started_at = 2026-01-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["prompt_lookup", "head:chat"]
weight = 0.5
[[variant]]
name = "candidate"
drafters = ["head:chat@0002", "head:code@0001"]
weight = 0.5
"""


class _Host:
    """An engine's heads by name; `broken` cannot be loaded."""

    def __init__(self) -> None:
        self.info = FAKE_INFO
        self.broken = ""
        self.calls: list[str] = []
        self.shadows: Sequence[ShadowPlan] = ()

    async def add_head(self, source: HeadSource) -> ModelInfo:
        self.calls.append(f"+{source.name}")
        if source.name == self.broken:
            raise ValueError(f"heads.{source.name}: hidden_size: is another")
        drafters = (*self.info.drafters, f"head:{source.name}")
        self.info = replace(self.info, drafters=drafters)
        return self.info

    async def remove_drafter(self, name: str) -> ModelInfo:
        self.calls.append(f"-{name.removeprefix('head:')}")
        drafters = tuple(d for d in self.info.drafters if d != name)
        self.info = replace(self.info, drafters=drafters)
        return self.info

    async def shadow(self, plans: Sequence[ShadowPlan]) -> ModelInfo:
        self.shadows = plans
        return self.info


class _Rig:
    def __init__(self, folder: Path, interval_seconds: float = 1000.0) -> None:
        self.folder = folder
        self.registry = HeadRegistry(folder / "registry")
        for name, content in (("chat", "a"), ("chat", "b"), ("code", "c")):
            head = folder / content
            head.mkdir()
            for file in ("config.json", "model.safetensors"):
                (head / file).write_text(content)
            self.registry.register(head, name)
        self.registry.promote("chat", "0001")
        self.host = _Host()
        self.seen: list[tuple[str, ...]] = []
        self.experiments = LiveExperiments(
            folder / "experiment.toml", RollbackStore(folder / "rollbacks"), 4
        )
        self.reload = DrafterReload(
            self.host,
            RegisteredHeads(self.registry),
            self.experiments,
            lambda info: self.seen.append(info.drafters),
            interval_seconds,
        )

    def write(self, text: str) -> None:
        (self.folder / "experiment.toml").write_text(text)


@pytest.fixture
def rig(tmp_path: Path) -> _Rig:
    return _Rig(tmp_path)


async def test_an_experiment_brings_its_heads_and_takes_them_with_it(rig: _Rig) -> None:
    await rig.reload.open(FAKE_INFO)
    assert rig.seen == [("prompt_lookup",)]
    rig.write(FILE)
    await rig.reload.reload()
    assert sorted(rig.seen[-1]) == [
        "head:chat", "head:chat@0001", "head:chat@0002", "head:code@0001", "prompt_lookup",
    ]  # fmt: skip
    (rig.folder / "experiment.toml").unlink()
    await rig.reload.reload()
    assert rig.seen[-1] == ("prompt_lookup",) == rig.host.info.drafters
    await rig.reload.stop()


async def test_rollbacks_that_cannot_be_read_leave_no_head_behind(rig: _Rig) -> None:
    await rig.reload.open(FAKE_INFO)
    rig.write(FILE)
    (rig.folder / "rollbacks").mkdir(exist_ok=True)
    broken = rig.folder / "rollbacks" / "trial.json"
    broken.write_text("no JSON")
    with pytest.raises(ValueError, match=r"Expecting value|trial"):
        await rig.reload.reload()
    assert rig.host.info.drafters == ("prompt_lookup",)
    broken.unlink()
    await rig.reload.reload()
    assert "head:chat@0002" in rig.host.info.drafters
    await rig.reload.stop()


def test_a_default_names_what_the_engine_has(rig: _Rig) -> None:
    """The shipped head fits some targets only; a draft model is always the engine's last choice."""
    heads = RegisteredHeads(rig.registry, (), ("prompt_lookup", "head", "head:chat"))
    without_head = heads.wanted((), frozenset({"prompt_lookup"})).names
    assert without_head.default == ("prompt_lookup", "head:chat")
    with_draft = heads.wanted((), frozenset({"prompt_lookup", "head", "draft_model"})).names
    assert with_draft.default == ("prompt_lookup", "head", "head:chat", "draft_model")
    assert RegisteredHeads(rig.registry).wanted().names.default is None


async def test_one_broken_head_leaves_everything_as_it_was(rig: _Rig) -> None:
    await rig.reload.open(FAKE_INFO)
    rig.host.broken = "code@0001"
    rig.write(FILE)
    with pytest.raises(ValueError, match=r"heads\.code@0001: hidden_size"):
        await rig.reload.reload()
    assert rig.host.info.drafters == ("prompt_lookup",)
    assert rig.host.calls == ["+chat@0001", "+chat@0002", "+code@0001", "-chat@0001", "-chat@0002"]
    assert rig.experiments.running is None
    assert rig.seen == [("prompt_lookup",)]
    await rig.reload.stop()


async def test_an_experiment_that_cannot_run_loads_nothing(rig: _Rig) -> None:
    await rig.reload.open(FAKE_INFO)
    for text, reason in (
        (FILE.replace("0002", "0009"), r"heads\.chat@0009: version"),
        (FILE.replace('"prompt_lookup"', '"other"'), "variant control.drafters: unknown drafter"),
    ):
        rig.write(text)
        with pytest.raises(ValueError, match=reason):
            await rig.reload.reload()
    assert rig.host.calls == []
    await rig.reload.stop()


async def test_a_promotion_while_an_experiment_runs_is_followed_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = _Rig(tmp_path, interval_seconds=0.01)
    rig.write(FILE)
    await rig.reload.open(FAKE_INFO)
    rig.registry.promote("chat", "0002")
    async with asyncio.timeout(30):
        while rig.experiments.names.versions["head:chat"] != "head:chat@0002":
            await asyncio.sleep(0.01)
        while "-chat@0001" not in rig.host.calls:
            await asyncio.sleep(0.01)
    assert rig.host.calls.count("+chat@0002") == 1, "it was there"
    (warned,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warned.startswith("experiment trial: head:chat is another version now")
    await rig.reload.stop()


async def test_a_promotion_of_a_broken_head_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = _Rig(tmp_path, interval_seconds=0.01)
    rig.write(FILE.replace('"head:chat@0002", ', ""))
    await rig.reload.open(FAKE_INFO)
    rig.host.broken = "chat@0002"
    rig.registry.promote("chat", "0002")
    async with asyncio.timeout(30):
        while "+chat@0002" not in rig.host.calls:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # some twenty further looks at the registry
    assert rig.experiments.names.versions["head:chat"] == "head:chat@0001"
    assert rig.host.calls.count("+chat@0002") == 1
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    await rig.reload.stop()


async def test_shadows_are_measured_beside_the_controls_head(rig: _Rig) -> None:
    rig.write(f'{FILE}[[shadow]]\ndrafter = "head:code@0001"\nshare = 0.25\n')
    await rig.reload.open(FAKE_INFO)
    assert rig.host.shadows == [ShadowPlan(("head:code@0001", "head:chat@0001"), 0.25)]
    rig.write(FILE)
    await rig.reload.reload()
    assert rig.host.shadows == []
    await rig.reload.stop()


def test_without_a_registry_no_head_is_found() -> None:
    assert RegisteredHeads().wanted().sources == {}
    with pytest.raises(RegistryError, match=r"heads\.chat: this server has no registry"):
        RegisteredHeads().wanted(["head:chat"])
