"""Heads come to a running engine and leave it, and its requests do not notice."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig, HeadSource, SpeculationConfig
from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.files import save_head
from engine.engine import Engine
from engine.loader import describe_model
from engine.request import SamplingParams
from tests.engine.driver import Outcome, request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.engine.head.test_head_drafter import PROMPTS, head_engine
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.thorough

SAMPLED = SamplingParams(temperature=0.8, seed=5)


@pytest.fixture
def source(tmp_path: Path) -> HeadSource:
    folder = save_tiny_head(tmp_path / "new", tiny_head(deep_tiny_llama()))
    return HeadSource("chat@0002", str(folder))


def _finish(engine: Engine, outcome: Outcome) -> None:
    while engine.has_work():
        outcome.add_step(engine)


@pytest.mark.parametrize("first", [("head",), ("prompt_lookup",), ()])
def test_a_head_that_is_added_drafts_and_running_requests_do_not_notice(
    source: HeadSource, tmp_path: Path, first: tuple[str, ...]
) -> None:
    plain = tiny_engine(target=deep_tiny_llama(), drafters=())
    engine = (
        head_engine(tmp_path)
        if first == ("head",)
        else tiny_engine(target=deep_tiny_llama(), drafters=first)
    )
    old = [request(f"old{i}", p, max_tokens=40, sampling=SAMPLED) for i, p in enumerate(PROMPTS)]
    outcome = Outcome()
    for item in old:
        engine.submit(item)
    for _ in range(4):
        outcome.add_step(engine)
    found: list[object] = []
    loading = threading.Thread(target=lambda: found.append(engine.load_head(source)))
    loading.start()
    while loading.is_alive() and engine.has_work():
        outcome.add_step(engine)
    loading.join()
    info = engine.add_drafter(found[0])  # type: ignore[arg-type]
    assert info.drafters == (*first, "head:chat@0002") == engine.info.drafters
    new = [request(f"new{i}", p, drafter="head:chat@0002") for i, p in enumerate(PROMPTS)]
    for item in new:
        engine.submit(item)
    _finish(engine, outcome)
    alone = [request(f"new{i}", p) for i, p in enumerate(PROMPTS)]
    assert outcome.token_ids == run(plain, [*old, *alone]).token_ids
    assert all(outcome.stats[item.request_id].drafter == "head:chat@0002" for item in new)
    assert all(outcome.stats[item.request_id].drafter in ("", *first) for item in old)
    engine.check_integrity()


def test_a_head_drafts_on_for_who_names_it_and_goes_with_the_last_of_them(
    source: HeadSource, tmp_path: Path
) -> None:
    engine = head_engine(tmp_path)
    engine.add_drafter(engine.load_head(source))
    runner = weakref.ref(engine._parts.roster.head("head:chat@0002").drafter.runner)  # type: ignore[union-attr]
    num_hooks = _num_hooks(engine)
    engine.submit(request("a", PROMPTS[0], max_tokens=30, drafter="head:chat@0002"))
    outcome = Outcome()
    for _ in range(3):
        outcome.add_step(engine)
    assert engine.remove_drafter("head:chat@0002").drafters == ("head",)
    outcome.add_step(engine)
    assert _num_hooks(engine) == num_hooks, "it still listens for the running request"
    # Assigned before the head was taken out, and handed over after: it is not refused.
    engine.submit(request("b", PROMPTS[1], drafter="head:chat@0002"))
    _finish(engine, outcome)
    assert outcome.stats["a"].num_accepted_tokens + outcome.stats["a"].num_draft_tokens > 0
    engine.audit_next()
    assert _num_hooks(engine) == num_hooks - 3, "its three layers are let go"
    gc.collect()
    assert runner() is None, "weights and cache are freed"
    engine.submit(request("c", PROMPTS[2], drafter="head:chat@0002"))
    _finish(engine, outcome)
    assert outcome.stats["c"].drafter == ""
    plain = tiny_engine(target=deep_tiny_llama(), drafters=())
    asked = [request("a", PROMPTS[0], max_tokens=30), request("b", PROMPTS[1])]
    expected = run(plain, asked).token_ids
    assert {name: outcome.token_ids[name] for name in "ab"} == expected


def _num_hooks(engine: Engine) -> int:
    return sum(len(m._forward_pre_hooks) for m in engine._verifier.runner.model.modules())


def test_a_head_that_is_wanted_again_before_it_went_stays(
    source: HeadSource, tmp_path: Path
) -> None:
    engine = head_engine(tmp_path)
    engine.add_drafter(engine.load_head(source))
    engine.submit(request("a", PROMPTS[0], drafter="head:chat@0002"))
    outcome = Outcome()
    outcome.add_step(engine)
    engine.remove_drafter("head:chat@0002")
    assert "head:chat@0002" in engine.add_drafter(engine.load_head(source)).drafters
    _finish(engine, outcome)
    engine.audit_next()
    assert engine._drafters.names == ("head", "head:chat@0002")


def test_what_drafts_by_default_cannot_be_taken_out(tmp_path: Path, source: HeadSource) -> None:
    engine = head_engine(tmp_path)
    for name in ("head", "head:unknown"):
        with pytest.raises(ValueError, match=name):
            engine.remove_drafter(name)
    ready = engine.load_head(source)
    engine.add_drafter(ready)
    with pytest.raises(ValueError, match="there already"):
        engine.add_drafter(ready)


def test_a_broken_head_is_refused_by_name_and_field(tmp_path: Path) -> None:
    engine = head_engine(tmp_path)
    before = engine.info
    head = tiny_head(deep_tiny_llama())
    other = save_tiny_head(tmp_path / "other", head, target_fingerprint="other")
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder, field in ((other, "target_fingerprint"), (empty, "config.json")):
        with pytest.raises(HeadFormatError, match=rf"heads\.x: .*{field}"):
            engine.load_head(HeadSource("x", str(folder)))
    assert engine.info == before


def test_a_head_that_does_not_fit_into_memory_is_refused(
    tmp_path: Path, source: HeadSource
) -> None:
    engine = head_engine(tmp_path)
    loader = engine._parts.roster._loader
    assert loader is not None
    loader._most_bytes = 1000
    with pytest.raises(HeadFormatError, match=r"heads\.chat@0002: memory: .* need \d+ MiB"):
        engine.load_head(source)


def test_a_layout_without_states_takes_no_head(source: HeadSource) -> None:
    engine = tiny_engine(target=deep_tiny_llama(), layout="aligned")
    with pytest.raises(HeadFormatError, match="layout"):
        engine.load_head(source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slim_head_is_completed_from_a_target_that_is_packed_already(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    target = deep_tiny_llama(dtype=dtype)
    reference = deep_tiny_llama(dtype=dtype)
    head = tiny_head(reference)
    folder = tmp_path / "slim"
    folder.mkdir()
    save_head(folder, head, {}, dtype=torch.float32, is_slim=True)
    config = EngineConfig(
        target="tiny", kv_cache_memory=5e8, speculation=SpeculationConfig(drafters=())
    )
    engine = Engine.from_models(config, describe_model("tiny", target, tiny_tokenizer()))
    ready = engine.load_head(HeadSource("slim", str(folder)))
    weight = ready.plan.head.lm_head.weight
    assert torch.equal(weight, reference.lm_head.weight[head.draft_token_ids])
