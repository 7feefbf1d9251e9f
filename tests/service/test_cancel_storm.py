"""Random cancels against a real engine leave no row, block, task or queue entry behind."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from service.assembly import assemble
from service.async_client import AsyncClient
from service.settings import ServiceSettings
from tests.service.cancels import cancel_at_random, leftovers, what_stays
from tests.tiny import save_tiny_model

NUM_CANCELS = 300


@pytest.mark.thorough
async def test_random_cancels_of_a_real_engine_leave_nothing(tmp_path: Path) -> None:
    settings = ServiceSettings(
        target=str(save_tiny_model(tmp_path / "tiny")),
        home=tmp_path,
        port=0,
        dtype="float32",
        max_num_rows=8,
        kv_cache_memory=1e6,  # rows are preempted, too
        max_waiting_requests=2_000,
        audit_share=0,
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    num_tasks = len(asyncio.all_tasks())
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        alone = await client.generate([5, 6, 7], max_tokens=20, seed=1).result()
        storm = asyncio.create_task(
            cancel_at_random(client, NUM_CANCELS, num_at_once=40), name="storm"
        )
        neighbour = await client.generate([5, 6, 7], max_tokens=20, seed=1).result()
        assert sum(leftovers(server, num_tasks).values()) > 0  # it can see what is held
        await storm
    assert neighbour.token_ids == alone.token_ids
    left = await what_stays(server, num_tasks)
    assert left == dict.fromkeys(left, 0)
    await server.stop(0.0)
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        by_outcome = dict(ledger.execute("SELECT outcome, count(*) FROM requests GROUP BY 1"))
        [num_open] = ledger.execute("SELECT count(*) FROM request_starts").fetchone()
    assert by_outcome["completed"] >= 2
    assert by_outcome["cancelled"] > NUM_CANCELS / 4  # the others ended, or never got there
    assert num_open == 0
