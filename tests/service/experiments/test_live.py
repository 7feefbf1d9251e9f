"""A server assigns by the experiment's file, takes changes over, and forgets no rollback."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from service.experiments.heads import DrafterNames
from service.experiments.live import LiveExperiments
from service.experiments.records import RollbackRecord, RollbackStore
from service.experiments.specification import ExperimentError
from service.orders import GenerationOrder, TextPrompt
from service.pb import generation_pb2 as pb
from telemetry.recording import OpenRequest
from tests.fakes import FAKE_INFO, FakeEngine, FakeRecording
from tests.service.serving import running_server
from tests.service.test_generate import text_request

FILE = """
name = "trial"
started_at = 2026-01-01T00:00:00Z
unit = "request"
[[variant]]
name = "control"
drafters = ["prompt_lookup"]
weight = 0.5
[[variant]]
name = "candidate"
drafters = ["prompt_lookup", "head:new"]
weight = 0.5
max_draft_tokens = 3
"""
DRAFTERS = ("prompt_lookup", "head:new")


def _live(tmp_path: Path, text: str = FILE) -> LiveExperiments:
    (tmp_path / "experiment.toml").write_text(text)
    found = LiveExperiments(tmp_path / "experiment.toml", RollbackStore(tmp_path / "rollbacks"), 4)
    _reload(found)
    return found


def _reload(live: LiveExperiments) -> None:
    found = live.read()
    live.check(found, DRAFTERS)
    live.take(found, DrafterNames())


def _rewrite(tmp_path: Path, *changes: tuple[str, str]) -> None:
    text = FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "experiment.toml").write_text(text)


def _order(request_id: str, **speculation: Any) -> GenerationOrder:
    return GenerationOrder(
        request_id=request_id,
        model="",
        prompt=TextPrompt("x"),
        sampling=SamplingParams(),
        stopping=StoppingParams(),
        speculation=SpeculationParams(**speculation),
    )


def _variant(live: LiveExperiments, request_id: str, tenant: str = "", now: float = 0.0) -> str:
    return live.assign(_order(request_id), tenant, now).variant


def test_a_request_gets_the_drafters_of_its_variant(tmp_path: Path) -> None:
    live = _live(tmp_path)
    seen = {}
    for index in range(50):
        assigned = live.assign(_order(f"r{index}"), "", 0.0)
        seen[assigned.variant] = assigned.order.speculation
        assert live.variant_of(f"r{index}#2") == assigned.variant
    assert seen["control"].drafters == ("prompt_lookup",)
    assert seen["control"].max_draft_tokens is None
    assert seen["candidate"].drafters == ("prompt_lookup", "head:new")
    assert seen["candidate"].max_draft_tokens == 3
    assert live.variant_of("never seen") == ""


def test_a_clients_own_choice_is_outside_of_the_experiment(tmp_path: Path) -> None:
    live = _live(tmp_path)
    for speculation in (
        {"drafter": "head:new"},
        {"drafters": ("head:new", "prompt_lookup")},
        {"mode": SpeculationMode.OFF},
    ):
        order = _order("a", **speculation)
        assert live.assign(order, "", 0.0).variant == ""
        assert live.assign(order, "", 0.0).order == order
    limited = [live.assign(_order(f"r{i}", max_draft_tokens=2), "", 0.0) for i in range(20)]
    assert {a.order.speculation.max_draft_tokens for a in limited} == {2}


def test_a_variant_without_drafters_decodes_plainly(tmp_path: Path) -> None:
    text = FILE.replace('drafters = ["prompt_lookup"]', "drafters = []")
    live = _live(tmp_path, text.replace("weight = 0.5\nmax", "weight = 0\nmax"))
    assert live.assign(_order("a"), "", 0.0).order.speculation.mode is SpeculationMode.OFF


def test_a_tenant_keeps_its_variant(tmp_path: Path) -> None:
    live = _live(tmp_path, FILE.replace('"request"', '"tenant"'))
    for tenant in ("a", "b", "c", "d", "e", "f"):
        assert len({_variant(live, f"r{index}", tenant) for index in range(20)}) == 1
    assert len({_variant(live, "r", str(tenant)) for tenant in range(20)}) == 2
    assert len({_variant(live, f"r{index}") for index in range(20)}) == 2, "nobody known: by id"


def test_slots_without_the_candidate_give_everybody_the_control(tmp_path: Path) -> None:
    live = _live(tmp_path, FILE.replace("[[variant]]", "slot_seconds = 60\n[[variant]]", 1))
    assert live.running is not None
    slots = live.running.slots
    assert slots is not None
    for index in range(8):
        variants = {_variant(live, f"r{r}", now=index * 60.0 + 30) for r in range(30)}
        assert variants == ({"control", "candidate"} if slots.has_candidate(index) else {"control"})


def test_changed_weights_need_a_new_start_and_are_taken_over_then(tmp_path: Path) -> None:
    live = _live(tmp_path)
    assert list(live.variants) == ["control", "candidate"]
    _rewrite(tmp_path, ("weight = 0.5\nmax", "weight = 0\nmax"))
    with pytest.raises(ExperimentError, match="started_at: must be moved"):
        _reload(live)
    assert list(live.variants) == ["control", "candidate"]
    _rewrite(tmp_path, ("weight = 0.5\nmax", "weight = 0\nmax"), ("2026-01-01", "2026-01-02"))
    _reload(live)
    assert list(live.variants) == ["control"]
    (tmp_path / "experiment.toml").unlink()
    _reload(live)
    assert list(live.variants) == []
    assert _variant(live, "a") == ""


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('"head:new"', '"head:newer"', r"variant candidate.drafters: unknown drafter 'head:newer'"),
        ("max_draft_tokens = 3", "max_draft_tokens = 5", "variant candidate.max_draft_tokens: 5"),
    ],
)
def test_what_this_server_cannot_do_is_refused(
    tmp_path: Path, old: str, new: str, field: str
) -> None:
    with pytest.raises(ExperimentError, match=field):
        _live(tmp_path, FILE.replace(old, new))


def test_a_rollback_holds_after_a_reload_and_a_restart_but_not_after_a_new_start(
    tmp_path: Path,
) -> None:
    live = _live(tmp_path)
    assert live.running is not None
    live.roll_back(
        RollbackRecord(
            "trial", live.running.started_at.isoformat(), "candidate", "it was bad", "now"
        )
    )
    assert list(live.variants) == ["control"]
    assert {_variant(live, f"r{index}") for index in range(50)} == {"control"}
    _reload(live)
    assert list(live.variants) == ["control"]
    again = _live(tmp_path)
    assert list(again.variants) == ["control"]
    assert again.as_read is not None
    assert again.as_read.weights["candidate"] == 0.5
    _rewrite(tmp_path, ("2026-01-01", "2026-02-01"))
    _reload(again)
    assert list(again.variants) == ["control", "candidate"]


class VariantsSeen(FakeRecording):
    """Keeps the variant and the drafters of every request."""

    seen: "list[tuple[str, tuple[str, ...] | None]]"

    def begin(self, request: GenerationRequest, *, variant: str, **more: Any) -> OpenRequest:
        row = (variant, request.speculation.drafters)
        self.seen = [*getattr(self, "seen", []), row]
        return FakeRecording.begin(self, request, variant=variant, **more)


async def test_the_variant_is_in_started_in_the_record_and_in_get_model(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(FILE)
    experiments = LiveExperiments(
        tmp_path / "experiment.toml", RollbackStore(tmp_path / "rollbacks"), 4
    )
    recording = VariantsSeen()
    engine = FakeEngine(info=replace(FAKE_INFO, drafters=DRAFTERS))
    async with running_server(engine, recording=recording, experiments=experiments) as running:
        model = await running.stub.GetModel(pb.GetModelRequest())
        assert list(model.variants) == ["control", "candidate"]
        told = []
        for _ in range(12):
            async for response in running.stub.Generate(text_request()):
                if response.HasField("started"):
                    told.append(response.started.variant)
    assert set(told) == {"control", "candidate"}
    drafters = {"control": ("prompt_lookup",), "candidate": ("prompt_lookup", "head:new")}
    assert recording.seen == [(variant, drafters[variant]) for variant in told]


async def test_without_an_experiment_there_is_no_variant() -> None:
    async with running_server() as running:
        model = await running.stub.GetModel(pb.GetModelRequest())
        assert list(model.variants) == []
        async for response in running.stub.Generate(text_request()):
            if response.HasField("started"):
                assert response.started.variant == ""
