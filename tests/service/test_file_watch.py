"""Changed files are taken over without a signal, however they change."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from service.file_watch import FileWatch, watch_of
from service.settings import ServiceSettings
from tests.k8s.kubelet import publish


class Reader:
    """Reads a file again whenever it is told to, as a server does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.texts: list[str | None] = []

    def __call__(self) -> None:
        self.texts.append(self._path.read_text() if self._path.exists() else None)

    async def has(self, *texts: str | None) -> bool:
        for _ in range(400):
            if self.texts == list(texts):
                return True
            await asyncio.sleep(0.01)
        return False


@asynccontextmanager
async def _watching(path: Path, on_change: Callable[[], None]) -> AsyncIterator[None]:
    watch = FileWatch([path], on_change, 0.01)
    watch.start()
    yield
    await watch.stop()


def _replace(path: Path, text: str) -> None:
    """In one go: what is half written would be read, and then read again."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


async def test_a_file_that_is_written_anew_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    reader = Reader(path)
    async with _watching(path, reader):
        await asyncio.sleep(0.05)
        assert reader.texts == []
        _replace(path, "another")
        assert await reader.has("another")
        await asyncio.sleep(0.05)
        assert reader.texts == ["another"]


async def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    publish(tmp_path, "file", "first", "..1")
    reader = Reader(tmp_path / "file")
    async with _watching(tmp_path / "file", reader):
        publish(tmp_path, "file", "later", "..2")  # of the same length
        assert await reader.has("later")


async def test_a_file_may_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "file"
    reader = Reader(path)
    async with _watching(path, reader):
        _replace(path, "here")
        assert await reader.has("here")
        path.unlink()
        assert await reader.has("here", None)


async def test_what_cannot_be_taken_over_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    calls = []

    def fail_first() -> None:
        calls.append(path.read_text())
        if len(calls) == 1:
            raise RuntimeError("planted")

    async with _watching(path, fail_first):
        for text in ("bad", "well"):
            _replace(path, text)
            for _ in range(400):
                if calls and calls[-1] == text:
                    break
                await asyncio.sleep(0.01)
    assert calls == ["bad", "well"]
    (failure,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert failure.getMessage() == "the change was not taken over"


def test_nothing_is_watched_unless_it_is_wanted() -> None:
    path = Path("file.toml")
    assert watch_of(ServiceSettings(reload_seconds=5), print) is None
    assert watch_of(ServiceSettings(experiment_file=path), print) is None
    for settings in (
        ServiceSettings(reload_seconds=5, access_file=path),
        ServiceSettings(reload_seconds=5, price_book=path),
        ServiceSettings(reload_seconds=5, experiment_file=path),
    ):
        assert watch_of(settings, print) is not None
