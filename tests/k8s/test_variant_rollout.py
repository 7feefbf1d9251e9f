"""A changed ConfigMap loads heads and changes shares on a server that goes on serving."""

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest
import torch

from engine.drafter.head.files import save_head
from engine.drafter.registry import HeadRegistry
from engine.loader import load_model
from service.async_client import AsyncClient
from tests.engine.heads import NUM_LAYERS, config_for, random_head
from tests.k8s.kubelet import publish
from tests.k8s.manifests import build, environment, serve_container
from tests.k8s.rollout import ServerProcess
from tests.tiny import save_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _registry(folder: Path, model: Path) -> Path:
    """With two versions of the head `chat`, the first one promoted."""
    target = load_model(str(model), dtype="float32", device="cpu")
    registry = HeadRegistry(folder / "registry")
    for size in (200, 300):
        made = folder / f"head-{size}"
        made.mkdir()
        head = random_head(target, config_for(target, size), list(range(3, 3 + size)))
        save_head(made, head, {"target_fingerprint": target.fingerprint}, dtype=torch.float32)
        registry.register(made, "chat")
    registry.promote("chat", "0001")
    return registry.root


def _file(*weights: float, day: int) -> str:
    """The repository's experiment, in every slot alike, with other weights since another day."""
    (made,) = build("experiment")
    text = re.sub(r"slot_seconds = \d+", "", made["data"]["experiment.toml"])
    text = re.sub(r"started_at = \S+", f"started_at = 2026-01-{day:02}T00:00:00Z", text)
    first, *rest = re.split(r"weight = [\d.]+", text)
    return first + "".join(
        f"weight = {weight}{part}" for weight, part in zip(weights, rest, strict=True)
    )


async def _variants(client: AsyncClient) -> list[str]:
    return list((await client.model()).variants)


async def _until(client: AsyncClient, expected: list[str]) -> None:
    for _ in range(300):
        if await _variants(client) == expected:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{await _variants(client)} instead of {expected}")


async def test_new_weights_come_into_force_without_a_restart(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", num_layers=NUM_LAYERS)
    serving = build("dev-cpu")
    path = Path(environment(serving, serve_container(serving))["TANDEM_EXPERIMENT_FILE"] or "")
    mount = tmp_path / "mount"
    mount.mkdir()  # the ConfigMap is optional: at first there is none
    server = ServerProcess(
        model,
        tmp_path / "home",
        10.0,
        TANDEM_REGISTRY=str(_registry(tmp_path, model)),
        TANDEM_EXPERIMENT_FILE=str(mount / path.name),
        TANDEM_RELOAD_SECONDS="0.2",
    )
    try:
        await server.start()
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            assert await _variants(client) == []
            publish(mount, path.name, _file(0.0, 1.0, day=1), "..1")
            await _until(client, ["candidate"])
            long = client.generate("a person", max_tokens=300, ignore_eos=True, speculation=True)
            running = asyncio.create_task(long.result())
            await client.generate("the quick", max_tokens=8, speculation=True).result()
            publish(mount, path.name, _file(1.0, 0.0, day=2), "..2")
            await _until(client, ["control"])
            await client.generate("the quick", max_tokens=8, speculation=True).result()
            publish(mount, path.name, "nonsense", "..3")  # is refused, and changes nothing
            await asyncio.sleep(1.0)
            assert await _variants(client) == ["control"]
            assert (await running).finish_reason
        assert await server.terminate() == 0  # the same process all the while
    finally:
        server.kill()
    with sqlite3.connect(tmp_path / "home" / "ledger.db") as connection:
        rows = connection.execute(
            "SELECT v.name FROM requests JOIN variants v USING (variant_key)"
        ).fetchall()
    assert sorted(name for (name,) in rows) == ["candidate", "candidate", "control"]
