"""The pulled model behind the whole service: `make test-model`."""

from pathlib import Path

import pytest

from service.assembly import assemble
from service.async_client import AsyncClient
from service.settings import ServiceSettings


@pytest.mark.model
async def test_chat_is_answered_and_speculation_changes_nothing(
    smollm2: Path, tmp_path: Path
) -> None:
    settings = ServiceSettings(
        target=str(smollm2), port=0, home=tmp_path, kv_cache_memory=2e8, audit_share=0
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            answers = [
                await client.generate(
                    [{"role": "user", "content": "What is the capital of France?"}],
                    max_tokens=24,
                    temperature=0,
                    speculation=speculation,
                ).result()
                for speculation in (True, False)
            ]
    finally:
        await server.stop(0.0)
    assert "Paris" in answers[0].text
    assert answers[0].token_ids == answers[1].token_ids
