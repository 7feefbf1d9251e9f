"""SIGHUP: a server takes over another price book, tokens and quotas while it serves."""

import hashlib
import logging
import sqlite3
from pathlib import Path
from typing import Any

import grpc
import pytest

from service.assembly import assemble
from service.async_client import AsyncClient
from service.attempts import RetryPolicy
from service.client_calls import Credentials, TandemError
from service.settings import ServiceSettings

_BOOK = """
version = "1"
[[price]]
machine_type = "default"
per_hour = "3.60"
valid_from = 2026-01-01T00:00:00Z
"""


def _prices(ledger: Path) -> list[int]:
    query = (
        "SELECT nano_usd_per_hour FROM requests JOIN prices USING (price_key) ORDER BY ledger_id"
    )
    with sqlite3.connect(ledger) as connection:
        return [row[0] for row in connection.execute(query)]


def _settings(tiny_model: Path, ledger: Path, **files: Any) -> ServiceSettings:
    return ServiceSettings(
        target=str(tiny_model),
        port=0,
        home=tiny_model.parent,
        kv_cache_memory=2e8,
        ledger_url=f"sqlite:///{ledger}",
        **files,
    )


async def test_requests_cost_what_the_book_said_when_they_ran(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book, ledger = tmp_path / "prices.toml", tmp_path / "ledger.db"
    book.write_text(_BOOK)
    server = assemble(_settings(tiny_model, ledger, price_book=book))
    await server.listen()
    server.reload()  # before there is anything to charge
    await server.load()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        await client.generate("the", max_tokens=3).result()
        for text in (_BOOK.replace("3.60", "7.20"), "no book at all"):
            book.write_text(text)
            server.reload()
            await client.generate("the", max_tokens=3).result()
    await server.stop(1.0)
    assert _prices(ledger) == [3_600_000_000, 7_200_000_000, 7_200_000_000]
    (refused,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert refused.getMessage().startswith("prices not reloaded")


async def test_a_reload_takes_over_tokens_and_quotas_and_what_is_served_was_warmed_up(
    tiny_model: Path, tmp_path: Path
) -> None:
    access = tmp_path / "access.toml"
    digests = [hashlib.sha256(token.encode()).hexdigest() for token in ("old", "new")]
    access.write_text(f'[tenants.a]\ntoken_sha256 = ["{digests[0]}"]\n')
    server = assemble(_settings(tiny_model, tmp_path / "ledger.db", access_file=access))
    await server.listen()
    await server.load()

    async def code(token: str) -> grpc.StatusCode:
        credentials = Credentials(token=token)
        once = RetryPolicy(max_attempts=1)
        address = f"127.0.0.1:{server.port}"
        async with AsyncClient(address, credentials=credentials, retry=once) as client:
            try:
                await client.generate("the", max_tokens=3).result()
            except TandemError as error:
                return error.code
            return grpc.StatusCode.OK

    async with AsyncClient(
        f"127.0.0.1:{server.port}", credentials=Credentials(token="old")
    ) as client:
        assert (await client.load()).num_steps > 0  # the engine ran before it served
    assert await code("old") is grpc.StatusCode.OK
    quota = "tokens_per_second = 0.001\nburst_tokens = 1\n"
    access.write_text(f'[tenants.a]\ntoken_sha256 = ["{digests[1]}"]\n{quota}')
    assert await code("new") is grpc.StatusCode.UNAUTHENTICATED  # not read yet
    server.reload()
    assert await code("old") is grpc.StatusCode.UNAUTHENTICATED
    assert await code("new") is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(1.0)
