"""SIGHUP: a server takes over another price book while it serves."""

import logging
import sqlite3
from pathlib import Path

import pytest

from service.assembly import assemble
from service.async_client import AsyncClient
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


async def test_requests_cost_what_the_book_said_when_they_ran(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    book, ledger = tmp_path / "prices.toml", tmp_path / "ledger.db"
    book.write_text(_BOOK)
    settings = ServiceSettings(
        target=str(tiny_model),
        port=0,
        home=tiny_model.parent,
        kv_cache_memory=2e8,
        ledger_url=f"sqlite:///{ledger}",
        price_book=book,
    )
    server = assemble(settings)
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
