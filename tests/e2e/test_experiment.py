"""Two heads side by side on a real server: variants by assignment, changed by SIGHUP's reload."""

import asyncio
import json
import logging
import shutil
import sqlite3
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.drafter.head.files import save_head
from engine.drafter.registry import HeadRegistry
from engine.loader import load_model
from service.assembly import SetUpError, assemble
from service.async_client import AsyncClient
from service.experiments.guard_rails import Action
from service.settings import ServiceSettings
from tests.engine.heads import NUM_LAYERS, config_for, random_head
from tests.ledger_file import rows_filed
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.thorough

_EXPERIMENT = """
name = "heads"
started_at = 2026-01-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["head:chat"]
weight = 0.5
[[variant]]
name = "candidate"
drafters = ["head:chat@0002"]
weight = 0.5
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a target under `target` and two versions of a head in its registry."""
    folder = tmp_path_factory.mktemp("home")
    path = save_tiny_model(folder / "target", num_layers=NUM_LAYERS)
    target = load_model(str(path), dtype="float32", device="cpu")
    registry = HeadRegistry(folder / "registry")
    for size in (200, 300):
        head = random_head(target, config_for(target, size), list(range(3, 3 + size)))
        made = folder / str(size)
        made.mkdir()
        save_head(made, head, {"target_fingerprint": target.fingerprint}, dtype=torch.float32)
        registry.register(made, "chat")
    registry.promote("chat", "0001")
    return folder


def _settings(folder: Path, tmp_path: Path, **changes: object) -> ServiceSettings:
    known = {
        "target": str(folder / "target"),
        "port": 0,
        "dtype": "float32",
        "max_num_rows": 4,
        "kv_cache_memory": 2e8,
        "home": folder,
        "ledger_url": f"sqlite:///{tmp_path / 'ledger.db'}",
        "experiment_file": tmp_path / "experiment.toml",
        "heads": ("chat", "chat@0002"),
    }
    return ServiceSettings(**{**known, **changes})  # type: ignore[arg-type]


async def _until_variants(client: AsyncClient, variants: list[str]) -> None:
    async with asyncio.timeout(60):
        while list((await client.model()).variants) != variants:
            await asyncio.sleep(0.02)


async def test_requests_are_spread_over_heads_and_the_text_is_the_same(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(_EXPERIMENT)
    server = assemble(_settings(home, tmp_path))
    await server.listen()
    await server.load()
    texts = set()
    options = {"max_tokens": 6, "seed": 1, "speculation": True}
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        for _ in range(12):
            result = await client.generate("the quick", **options).result()
            texts.add(result.text)
        path.write_text(_EXPERIMENT.replace("2026-01-01", "2026-01-02").replace(
            'weight = 0.5\n[[', 'weight = 1\n[['
        ).replace('0002"]\nweight = 0.5', '0002"]\nweight = 0'))  # fmt: skip
        server.reload()
        await _until_variants(client, ["control"])
        for _ in range(6):
            result = await client.generate("the quick", **options).result()
            texts.add(result.text)
    await server.stop(1.0)
    assert len(texts) == 1, "who drafts must not change what is written"
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute(
            "SELECT v.name, d.name FROM requests r JOIN variants v USING (variant_key) "
            "LEFT JOIN drafters d ON d.drafter_key = r.drafter_key ORDER BY ledger_id"
        ).fetchall()
    assert len(rows) == 18
    assert {variant for variant, _ in rows[:12]} == {"control", "candidate"}
    assert {variant for variant, _ in rows[12:]} == {"control"}
    drafters = {"control": "head:chat@0001", "candidate": "head:chat@0002"}
    assert all(drafter in (None, drafters[variant]) for variant, drafter in rows)
    assert {drafter for _, drafter in rows[:12] if drafter} == set(drafters.values())


async def test_heads_of_the_file_are_loaded_with_it_and_an_unknown_one_stops_the_start(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "experiment.toml").write_text(_EXPERIMENT.replace("0002", "0003"))
    server = assemble(_settings(home, tmp_path, heads=()))
    await server.listen()
    with pytest.raises(ValueError, match=r"heads\.chat@0003: version: chat has no version 0003"):
        await server.load()
    await server.stop(0.0)
    with pytest.raises(SetUpError, match=r"heads\.chat@0003: version: chat has no version 0003"):
        assemble(_settings(home, tmp_path, heads=("chat@0003",)))


def _copied(home: Path, tmp_path: Path) -> Path:
    """A home of the test's own, whose registry it may change."""
    copy = tmp_path / "copied"
    shutil.copytree(home / "registry", copy / "registry")
    (copy / "target").symlink_to(home / "target")
    return copy


async def test_a_new_head_is_loaded_on_reload_and_an_unused_one_goes_while_requests_run(
    home: Path, tmp_path: Path
) -> None:
    own, path = _copied(home, tmp_path), tmp_path / "experiment.toml"
    settings = _settings(own, tmp_path, heads=("chat",), finish_when_recorded=True)
    server = assemble(settings)
    await server.listen()
    await server.load()
    options: dict[str, Any] = {
        "max_tokens": 400,
        "seed": 1,
        "speculation": True,
        "ignore_eos": True,
    }
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        found = (await client.model()).drafters
        assert [d for d in found if "head:" in d] == ["head:chat@0001", "head:chat"]
        alone = await client.generate("the quick", **options).result()
        stream = client.generate("the quick", **options, drafter="head:chat")
        running = asyncio.create_task(stream.result())
        while not server.num_live_requests:
            await asyncio.sleep(0)
        HeadRegistry(own / "registry").promote("chat", "0002")
        path.write_text(_EXPERIMENT.replace('"head:chat"]', '"prompt_lookup"]'))
        server.reload()
        await _until_variants(client, ["control", "candidate"])
        found = (await client.model()).drafters
        assert [d for d in found if "head:" in d] == ["head:chat@0002", "head:chat"]
        await client.generate(
            "the quick",
            request_id="after",
            max_tokens=8,
            speculation=True,
            drafter="head:chat",
            ignore_eos=True,
        ).result()
        rest = await running
        assert rest.text == alone.text, "the change was noticed"
        path.unlink()
        server.reload()
        await _until_variants(client, [])
    await server.stop(5.0)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute(
            "SELECT r.request_id, d.name FROM requests r LEFT JOIN drafters d USING (drafter_key) "
            "ORDER BY ledger_id"
        ).fetchall()
    drafters = dict(rows)
    assert drafters["after"] == "head:chat@0002", "a new request follows the promotion"
    assert drafters[rest.request_id] == "head:chat@0001", "a running one ends with what it had"


async def test_a_broken_head_is_refused_by_name_and_changes_nothing(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, path = _copied(home, tmp_path), tmp_path / "experiment.toml"
    path.write_text(_EXPERIMENT)
    server = assemble(_settings(own, tmp_path, heads=()))
    await server.listen()
    await server.load()
    broken = own / "registry" / "chat" / "versions" / "0003"
    shutil.copytree(own / "registry" / "chat" / "versions" / "0002", broken)
    config = json.loads((broken / "config.json").read_text())
    config["norm_before_fc"] = "perhaps"
    (broken / "config.json").write_text(json.dumps(config))
    registration = json.loads((broken / "registration.json").read_text())
    (broken / "registration.json").write_text(json.dumps(registration | {"version": "0003"}))
    path.write_text(_EXPERIMENT.replace("2026-01-01", "2026-01-02").replace("0002", "0003"))
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        before = await client.model()
        server.reload()
        async with asyncio.timeout(60):
            while not (told := [r for r in caplog.records if r.levelno == logging.ERROR]):
                await asyncio.sleep(0.02)
        assert "heads.chat@0003: " in told[0].getMessage()
        assert "norm_before_fc" in told[0].getMessage()
        assert await client.model() == before
    await server.stop(1.0)


async def test_a_promotion_is_followed_without_a_signal(home: Path, tmp_path: Path) -> None:
    own = _copied(home, tmp_path)
    settings = _settings(
        own,
        tmp_path,
        heads=(),
        drafters=("prompt_lookup", "head:chat"),
        experiment_file=None,
        experiment_check_seconds=0.05,
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "speculation": True}
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        await client.generate("the quick", **options).result()
        HeadRegistry(own / "registry").promote("chat", "0002")
        async with asyncio.timeout(60):
            while "head:chat@0002" not in (await client.model()).drafters:
                await asyncio.sleep(0.02)
        await client.generate("the quick", **options).result()
    await server.stop(5.0)
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute(
            "SELECT d.name FROM requests JOIN drafters d USING (drafter_key) ORDER BY ledger_id"
        ).fetchall()
    assert [name for (name,) in rows] == ["head:chat@0001", "head:chat@0002"]


_UNEQUAL = """
name = "unequal"
started_at = 2026-01-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["draft_model"]
weight = 0.5
[[variant]]
name = "candidate"
drafters = []
weight = 0.5
[guard_rails]
alpha = 0.5
min_units = 10
"""


async def test_a_server_rolls_a_bad_candidate_back_from_its_own_rows(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidate drafts nothing; the control's draft model is the target itself, so that all
    its drafts are accepted."""
    monkeypatch.setattr("service.experiments.ledger_reader.LAG", timedelta(0))
    (tmp_path / "experiment.toml").write_text(_UNEQUAL)
    settings = _settings(
        home,
        tmp_path,
        heads=(),
        draft=str(home / "target"),
        home=tmp_path / "home",
        finish_when_recorded=True,
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    watch = server._parts.watch
    assert watch is not None
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        assert list((await client.model()).variants) == ["control", "candidate"]
        for _ in range(6):
            streams = [
                client.generate("the quick", max_tokens=16, temperature=0, speculation=True)
                for _ in range(16)
            ]
            await asyncio.gather(*(stream.result() for stream in streams))
            decision = (await watch.look())["candidate"]
            if decision.action is not Action.CONTINUE:
                break
        assert list((await client.model()).variants) == ["control"], decision
    await server.stop(1.0)
    (record,) = json.loads((tmp_path / "home" / "experiments" / "unequal.json").read_text())
    assert record["variant"] == "candidate"
    assert record["rule"].startswith("acceptance length: changed by -")


_SHADOW = """
name = "shadow"
started_at = 2026-01-01T00:00:00Z
[[variant]]
name = "control"
drafters = ["head:chat"]
weight = 1
[[shadow]]
drafter = "head:chat@0002"
share = 1.0
"""


async def test_a_head_in_the_shadow_is_measured_and_drafts_for_nobody(
    home: Path, tmp_path: Path
) -> None:
    (tmp_path / "experiment.toml").write_text(_SHADOW)
    server = assemble(_settings(home, tmp_path, heads=(), audit_share=0))
    await server.listen()
    await server.load()
    found: list[tuple[object, ...]] = []
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "speculation": True}
        results = [await client.generate("the quick", **options).result() for _ in range(3)]
        query = (
            "SELECT s.request_id, d.name, num_rounds, num_accepted_tokens FROM shadow_results s "
            "JOIN drafters d USING (drafter_key) ORDER BY shadow_id"
        )
        async with asyncio.timeout(60):
            while len(found) < 6:
                await asyncio.sleep(0.1)
                found = rows_filed(tmp_path / "ledger.db", query)
    await server.stop(1.0)
    assert {row[0] for row in found} == {result.request_id for result in results}
    assert {row[1] for row in found} == {"head:chat@0001", "head:chat@0002"}
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute(
            "SELECT r.request_id, d.name, r.num_plain_steps + r.num_verify_steps - 1, "
            "r.num_emitted_accepted_tokens FROM requests r JOIN drafters d USING (drafter_key)"
        ).fetchall()
    assert {row[1] for row in rows} == {"head:chat@0001"}
    assert set(rows) <= set(found), "the replay counts what live rounds of full length counted"
