"""A rolling update under load, as a Deployment with maxSurge 1 does it: nobody notices."""

import asyncio
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from service.async_client import AsyncClient, GenerationResult
from tests.k8s.rollout import Forwarder, ServerProcess, forwarder
from tests.tiny import save_tiny_model

PROMPTS = ["the quick brown fox", "a person sees", "0123456789 " * 5, "jumps over the lazy dog"]
NUM_CLIENTS = 4
GRACE_SECONDS = 60.0
PRE_STOP_SECONDS = 1.0
LONG_STREAM_TOKENS = 6000  # seconds of decoding, even where a step takes a millisecond

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Load:
    """Clients that ask without a pause until they are told to stop."""

    addresses: list[str]
    expected: dict[str, list[int]]
    num_done: int = 0
    failures: list[str] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, num_tokens: int) -> None:
        await asyncio.gather(*(self._client(index, num_tokens) for index in range(NUM_CLIENTS)))

    async def _client(self, index: int, num_tokens: int) -> None:
        """One connection for all of its requests, as a backend has it."""
        async with AsyncClient(self.addresses[index]) as client:
            while not self.stop.is_set():
                prompt = PROMPTS[index % len(PROMPTS)]
                try:
                    result = await _ask(client, prompt, num_tokens)
                except Exception as error:
                    self.failures.append(f"client {index}, after {self.num_done}: {error}")
                    continue
                if result.token_ids != self.expected.setdefault(prompt, result.token_ids):
                    self.failures.append(f"client {index}: other tokens")
                self.num_done += 1


async def _ask(
    client: AsyncClient, prompt: str, num_tokens: int, *, ignore_eos: bool = False
) -> GenerationResult:
    return await client.generate(
        prompt,
        max_tokens=num_tokens,
        temperature=0.7,
        seed=5,
        ignore_eos=ignore_eos,
        timeout_seconds=240,
    ).result()


async def _roll(front: Forwarder, old: ServerProcess, new: ServerProcess) -> int:
    """What the Deployment, the endpoints and the kubelet do; the old one's exit status."""
    await new.start()
    front.ports.append(new.port)
    front.ports.remove(old.port)
    await asyncio.sleep(PRE_STOP_SECONDS)
    return await asyncio.wait_for(old.terminate(), GRACE_SECONDS + 40)


async def test_a_rolling_update_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    servers = [ServerProcess(model, tmp_path / f"pod{i}", GRACE_SECONDS) for i in range(4)]
    try:
        async with forwarder(NUM_CLIENTS) as front:
            for server in servers[:2]:
                await server.start()
                front.ports.append(server.port)
            load = Load(front.addresses, {})
            running = asyncio.create_task(load.run(num_tokens=100))
            while load.num_done < 2 * NUM_CLIENTS:
                await asyncio.sleep(0.1)
            done_before = load.num_done
            for old, new in zip(servers[:2], servers[2:], strict=True):
                assert await _roll(front, old, new) == 0
            done_after = load.num_done
            while load.num_done < done_after + 2 * NUM_CLIENTS and not load.failures:
                await asyncio.sleep(0.1)
            load.stop.set()
            await running
            assert load.failures == []
            assert done_after > done_before
            for server in servers[2:]:
                assert await server.terminate() == 0
        # Clients would resume a stream that was cut, so the ledgers say that none was.
        pods = [_outcomes(tmp_path / f"pod{index}" / "ledger.db") for index in range(len(servers))]
        assert all(outcomes.keys() <= {"completed", "refused"} for outcomes in pods), pods
        assert all(outcomes.get("completed", 0) > 0 for outcomes in pods), pods
        assert sum(outcomes["completed"] for outcomes in pods) == load.num_done
    finally:
        for server in servers:
            server.kill()


async def test_a_channel_with_a_long_stream_gets_its_next_request_from_another_server(
    tmp_path: Path,
) -> None:
    model = save_tiny_model(tmp_path / "tiny", max_tokens=8192)
    servers = [ServerProcess(model, tmp_path / f"pod{i}", GRACE_SECONDS) for i in range(2)]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        async with forwarder(1) as front, AsyncClient(front.addresses[0]) as client:
            front.ports = [servers[0].port]
            long = asyncio.create_task(
                _ask(client, "the quick", LONG_STREAM_TOKENS, ignore_eos=True)
            )
            await _ask(client, "a", 2)
            front.ports = [servers[1].port]
            leaving = asyncio.create_task(servers[0].terminate())
            await asyncio.sleep(PRE_STOP_SECONDS)
            await _ask(client, "a", 2)
            assert not long.done(), "the stream was too short to show anything"
            assert (await long).finish_reason
            assert await leaving == 0
    finally:
        for server in servers:
            server.kill()


def _outcomes(ledger: Path) -> dict[str, int]:
    with sqlite3.connect(ledger) as connection:
        return dict(
            connection.execute("SELECT outcome, count(*) FROM requests GROUP BY outcome").fetchall()
        )
