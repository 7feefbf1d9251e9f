"""The whole server over a tiny random model: gRPC in, ledger rows out."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from service.app import Server
from service.assembly import assemble
from service.async_client import AsyncClient
from service.settings import ServiceSettings
from tests.tiny import save_tiny_model


@dataclass(frozen=True)
class TinyService:
    server: Server
    client: AsyncClient
    settings: ServiceSettings
    ledger: Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def tiny_service(tiny_model: Path, tmp_path: Path) -> AsyncIterator[TinyService]:
    settings = ServiceSettings(
        target=str(tiny_model),
        port=0,
        dtype="float32",
        max_num_rows=8,
        kv_cache_memory=2e8,
        home=tiny_model.parent,  # measured costs are kept there from test to test
        ledger_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        audit_share=1.0,
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    async with AsyncClient(f"127.0.0.1:{server.port}") as client:
        yield TinyService(server, client, settings, tmp_path / "ledger.db")
    await server.stop(0.0)
