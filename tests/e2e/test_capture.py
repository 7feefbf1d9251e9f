"""From a server that keeps prompts to the prompts that training reads."""

import hashlib
import sqlite3
from pathlib import Path

from engine.loader import load_tokenizer
from engine.training.prompt_sources import jsonl_prompts
from service.assembly import assemble
from service.async_client import AsyncClient
from service.client_calls import Credentials
from service.settings import ServiceSettings

_TOKENS = {"open": "token of one who may be kept", "closed": "token of one who opted out"}


def _access(path: Path) -> Path:
    text = ""
    for tenant, token in _TOKENS.items():
        digest = hashlib.sha256(token.encode()).hexdigest()
        text += f'[tenants.{tenant}]\ntoken_sha256 = ["{digest}"]\n'
    path.write_text(f"{text}capture = false\n")
    return path


async def test_captured_conversations_are_prompts_of_the_next_head(
    tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "patterns").write_text("lazy")
    settings = ServiceSettings(
        target=str(tiny_model),
        port=0,
        home=tmp_path / "home",
        kv_cache_memory=2e8,
        ledger_url=f"sqlite:///{tmp_path / 'ledger.db'}",
        access_file=_access(tmp_path / "access.toml"),
        capture_folder=tmp_path / "captured",
        capture_share=1.0,
        capture_redaction=str(tmp_path / "patterns"),
    )
    server = assemble(settings)
    await server.listen()
    await server.load()
    address = f"127.0.0.1:{server.port}"
    chats = [
        [{"role": "user", "content": "the quick brown fox"}],
        [
            {"role": "user", "content": "the other person"},
            {"role": "assistant", "content": "sees"},
            {"role": "user", "content": "over the dog"},
        ],
        [{"role": "user", "content": "a lazy dog"}],
    ]
    for tenant, token in _TOKENS.items():
        async with AsyncClient(address, credentials=Credentials(token=token)) as client:
            for index, chat in enumerate(chats):
                await client.generate(chat, request_id=f"{tenant}-{index}", max_tokens=2).result()
    await server.stop(1.0)
    (path,) = (tmp_path / "captured").iterdir()
    found = list(jsonl_prompts(path, load_tokenizer(str(tiny_model)), max_prompt_tokens=400))
    assert [prompt.source for prompt in found] == ["captured"] * 3, "one tenant has opted out"
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        lengths = dict(connection.execute("SELECT request_id, num_prompt_tokens FROM requests"))
    served = [lengths[f"open-{index}"] for index in range(2)]
    assert [len(prompt.token_ids) for prompt in found[:2]] == served, "as the target read them"
    assert "[redacted]" in path.read_text()
    assert "lazy" not in path.read_text()
    content = [p for p in tmp_path.rglob("*") if p.is_file() and b"brown fox" in p.read_bytes()]
    assert content == [path], "the prompt is nowhere else"
