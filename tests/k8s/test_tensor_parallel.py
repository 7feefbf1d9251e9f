"""Several GPUs of a pod share a target: the processes fit each other, drain, and end together."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run

from service.async_client import AsyncClient
from service.client_calls import TandemError
from tests.k8s.manifests import (
    MULTI_NODE,
    ROOT,
    Resource,
    build,
    environment,
    launched,
    pods,
    serve_container,
)
from tests.k8s.rollout import ServerProcess
from tests.k8s.test_policy import FLUSH_SECONDS
from tests.ports import free_port
from tests.tiny import save_tiny_model

OVERLAY = "prod-gpu-tp"


@pytest.fixture(params=[OVERLAY, MULTI_NODE])
def split(request: pytest.FixtureRequest) -> list[Resource]:
    return build(request.param)


def test_torchrun_starts_a_process_for_each_gpu_and_each_shard() -> None:
    split = build(OVERLAY)  # the groups of several machines: test_multi_node
    container = serve_container(split)
    options, arguments = launched(container)
    parsed = torch.distributed.run.get_args_parser().parse_args([*options, "tandem", *arguments])
    assert parsed.no_python
    assert (parsed.nnodes, parsed.training_script, arguments) == ("1", "tandem", ["serve"])
    shards = environment(split, container)["TANDEM_TENSOR_PARALLEL"]
    assert parsed.nproc_per_node == shards == container["resources"]["limits"]["nvidia.com/gpu"]
    assert parsed.master_addr == "127.0.0.1"  # the processes trust each other


def test_torchrun_waits_for_the_drain_and_the_kubelet_for_torchrun(split: list[Resource]) -> None:
    pre_stop = serve_container(split)["lifecycle"]["preStop"]["sleep"]["seconds"]
    torchruns = [(pod, c) for pod in pods(split) for c in pod.ours() if "command" in c]
    assert torchruns
    for pod, container in torchruns:  # workers as long as leaders: they compute its streams
        options, _ = launched(container)
        (wait,) = re.findall(r"--shutdown-timeout=(\d+)", " ".join(options))
        grace = environment(split, container)["TANDEM_GRACE_SECONDS"]
        assert int(wait) >= float(grace or 0) + FLUSH_SECONDS
        assert pod.spec["terminationGracePeriodSeconds"] >= pre_stop + int(wait)


_VARIABLES = {
    "TANDEM_TENSOR_PARALLEL": "2",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
_PROGRAMS = Path(sys.executable).parent


def _command(container: Mapping[str, Any], **changes: object) -> list[str | Path]:
    """A manifest's own torchrun command, with some of its options changed."""
    options, arguments = launched(container)
    for name, value in changes.items():
        flag = f"--{name.replace('_', '-')}="
        options = [flag + str(value) if text.startswith(flag) else text for text in options]
    return [_PROGRAMS / "torchrun", *options, _PROGRAMS / "tandem", *arguments]


class _SplitServer(ServerProcess):
    """`tandem serve` started by the overlay's own torchrun command, on processors."""

    def command(self) -> list[str | Path]:
        return _command(serve_container(build(OVERLAY)), master_port=free_port())


def _server(tmp_path: Path) -> _SplitServer:
    model = save_tiny_model(tmp_path / "tiny", max_tokens=2048)
    return _SplitServer(model, tmp_path / "home", 60.0, **_VARIABLES)


class _Group(ServerProcess):
    """The pods of a LeaderWorkerSet on this machine: a torchrun each, with one process each."""

    worker: asyncio.subprocess.Process

    def commands(self) -> list[list[str | Path]]:
        found = [pod for pod in pods(build(MULTI_NODE)) if "LeaderWorkerSet" in pod.owner]
        place = {"nnodes": 2, "nproc_per_node": 1, "master_addr": "127.0.0.1"}
        port = free_port()
        return [
            _command(pod.spec["containers"][0], **place, node_rank=rank, master_port=port)
            for rank, pod in enumerate(found)
        ]

    async def start(self) -> None:
        leader, worker = self.commands()
        self.command = lambda: leader  # type: ignore[method-assign]
        self.worker = await asyncio.create_subprocess_exec(
            *worker, env=self.environ, stderr=asyncio.subprocess.DEVNULL
        )
        await super().start()


def _children(process_id: int) -> list[int]:
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    return [int(child) for child in path.read_text().split()]


async def _ended(process_ids: list[int]) -> bool:
    for _ in range(600):
        if not any(Path(f"/proc/{process_id}").exists() for process_id in process_ids):
            return True
        await asyncio.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_split_server_finishes_its_stream_after_sigterm(tmp_path: Path) -> None:
    server = _server(tmp_path)
    try:
        await server.start()
        processes = _children(server.process_id)
        assert len(processes) == 2
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            long = client.generate("the quick", max_tokens=1500, ignore_eos=True, temperature=0)
            running = asyncio.create_task(long.result())
            await client.generate("a", max_tokens=2).result()
            leaving = asyncio.create_task(server.terminate())
            await asyncio.sleep(1.0)
            assert not running.done(), "the stream was too short to show anything"
            assert len((await running).token_ids) == 1500
            await leaving
        assert await _ended(processes)
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_without_its_leader_nothing_stays(tmp_path: Path) -> None:
    server = _server(tmp_path)
    try:
        await server.start()
        processes = _children(server.process_id)
        for process_id in processes:
            environ = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
            if b"RANK=0" in environ:
                os.kill(process_id, signal.SIGKILL)
        assert await _ended(processes)
        assert await server.wait() != 0
    finally:
        server.kill()


class _FailingServer(_SplitServer):
    """The same, but that its leader fails when it is told to."""

    def command(self) -> list[str | Path]:
        *torchrun, _, serve = super().command()
        return [*torchrun, sys.executable, "-m", "tests.k8s.failing_shard", serve]


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_forward_that_fails_ends_all_processes_with_an_error(tmp_path: Path) -> None:
    model, fail_when = save_tiny_model(tmp_path / "tiny"), tmp_path / "fail"
    planted = {"FAIL_WHEN": str(fail_when), "PYTHONPATH": str(ROOT)}
    server = _FailingServer(model, tmp_path / "home", 10.0, **_VARIABLES, **planted)
    try:
        await server.start()
        processes = _children(server.process_id)
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            await client.generate("the quick", max_tokens=4).result()
            fail_when.touch()
            with pytest.raises(TandemError, match="UNAVAILABLE"):
                await client.generate("the quick", max_tokens=4, timeout_seconds=5).result()
        assert await asyncio.wait_for(server.wait(), 60) != 0
        assert await _ended(processes)
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_pods_of_a_group_serve_together_and_end_together(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    group = _Group(model, tmp_path / "home", 10.0, **_VARIABLES)
    try:
        await group.start()
        async with AsyncClient(f"127.0.0.1:{group.port}") as client:
            result = await client.generate("the quick", max_tokens=20, ignore_eos=True).result()
            assert len(result.token_ids) == 20
        await group.terminate()
        assert await asyncio.wait_for(group.worker.wait(), 60) == 0  # it was told
    finally:
        group.kill()
        if group.worker.returncode is None:
            group.worker.kill()
