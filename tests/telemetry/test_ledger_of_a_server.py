"""A real server on a real port over a real ledger: every call leaves one row with its outcome."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from service.async_client import AsyncClient
from service.client_calls import TandemError
from telemetry.assembly import RecorderConfig, open_recorder
from telemetry.ledger import models
from telemetry.ledger.queries import check_ledger, ledger_stats
from telemetry.ledger.session import open_ledger
from telemetry.otel import OtelConfig, start_telemetry
from telemetry.prices import fixed_price
from tests.fakes import FAKE_INFO, FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import text_request
from tests.telemetry.recording_rig import Rig


def _open(folder: Path) -> Rig:
    telemetry = start_telemetry(OtelConfig())
    config = RecorderConfig(f"sqlite:///{folder}/l.db", folder / "journal", fixed_price("3.6"))
    recorder = open_recorder(config, FAKE_INFO, telemetry)
    return Rig(recorder, telemetry, config.ledger_url, None, None)  # type: ignore[arg-type]


async def _call_in_every_way(address: str) -> None:
    async with AsyncClient(address) as client:
        completed = [client.generate(text_request()).result() for _ in range(5)]
        await asyncio.gather(*completed)
        with pytest.raises(TandemError):
            await client.generate("x", temperature=-1).result()
        with pytest.raises(TandemError):
            await client.generate("x", max_tokens=4000, timeout_seconds=0.2).result()
        async with aclosing(client.generate("x", max_tokens=4000).events()) as events:
            await anext(events)
            await anext(events)


async def test_every_call_is_one_row_with_the_status_that_the_client_got(tmp_path: Path) -> None:
    rig = _open(tmp_path)
    async with running_server(
        FakeEngine(step_seconds=0.005), recording=rig.recorder, grace_seconds=5.0
    ) as running:
        await _call_in_every_way(running.address)
    rig.recorder.close()
    rows = rig.requests()
    outcomes = sorted((row.outcome, row.status_code) for row in rows)
    assert outcomes == [
        ("cancelled", "CANCELLED"),
        *[("completed", "OK")] * 5,
        ("deadline_exceeded", "DEADLINE_EXCEEDED"),
        ("refused", "INVALID_ARGUMENT"),
    ]
    assert rig.rows(models.RequestStart) == []
    for row in rows:
        assert (row.cost_nano_usd > 0) == (row.outcome != "refused")
        assert (row.ttft_seconds is not None) == (row.outcome != "refused")
    engine = open_ledger(rig.url, read_only=True)
    findings = check_ledger(engine)
    assert all(finding.is_good for finding in findings), findings
    assert ledger_stats(engine).num_output_tokens >= 50
    engine.dispose()
