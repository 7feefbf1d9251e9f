"""The registry: versions that never change, a pointer that flips, content that is checked."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from engine.drafter.head.file_names import CONFIG, WEIGHTS
from engine.drafter.registry import HeadRegistry, RegistryError, head_fingerprint


def _head(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text("{}")
    (folder / WEIGHTS).write_text(content)
    return folder


@pytest.fixture
def registry(tmp_path: Path) -> HeadRegistry:
    return HeadRegistry(tmp_path / "registry")


def test_versions_count_up_and_equal_content_is_one_version(
    registry: HeadRegistry, tmp_path: Path
) -> None:
    first = registry.register(_head(tmp_path / "a", "one"), "chat", note="first")
    second = registry.register(_head(tmp_path / "b", "two"), "chat")
    again = registry.register(_head(tmp_path / "c", "one"), "chat")
    assert (first.version, second.version, again.version) == ("0001", "0002", "0001")
    assert first.fingerprint != second.fingerprint
    assert [v.note for v in registry.versions("chat")] == ["first", ""]
    assert registry.names() == ["chat"]
    assert sorted(p.name for p in (registry.root / "chat" / "versions").iterdir()) == [
        "0001",
        "0002",
    ]


def test_registering_promotes_nothing(registry: HeadRegistry, tmp_path: Path) -> None:
    registry.register(_head(tmp_path / "a", "one"), "chat")
    with pytest.raises(RegistryError, match="chat: no version is promoted"):
        registry.resolve("chat")
    assert registry.resolve("chat@0001").version == "0001"


def test_rollback_goes_back_step_by_step(registry: HeadRegistry, tmp_path: Path) -> None:
    for content in ("one", "two", "three"):
        version = registry.register(_head(tmp_path / content, content), "chat").version
        registry.promote("chat", version)
    assert registry.promote("chat", "0003").history == ("0001", "0002")  # twice is once
    assert registry.rollback("chat").current == "0002"
    assert registry.resolve("chat").version == "0002"
    assert registry.rollback("chat").current == "0001"
    with pytest.raises(RegistryError, match="no earlier version"):
        registry.rollback("chat")


def test_a_name_that_nobody_registered_is_refused_by_name(registry: HeadRegistry) -> None:
    with pytest.raises(RegistryError, match="nobody"):
        registry.rollback("nobody")


def test_changed_files_are_not_promoted(registry: HeadRegistry, tmp_path: Path) -> None:
    version = registry.register(_head(tmp_path / "a", "one"), "chat").version
    (registry.folder_of("chat", version) / WEIGHTS).write_text("other")
    with pytest.raises(RegistryError, match=r"fingerprint: the files of chat@0001"):
        registry.promote("chat", version)
    assert registry.pointer("chat").current is None


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65])
def test_a_name_is_no_path(registry: HeadRegistry, tmp_path: Path, name: str) -> None:
    with pytest.raises(RegistryError, match="name"):
        registry.register(_head(tmp_path / "a", "one"), name)
    with pytest.raises(RegistryError, match="name"):
        registry.pointer(name)


def test_what_is_not_there_is_named(registry: HeadRegistry, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match=r"has no config\.json"):
        registry.register(tmp_path, "chat")
    registry.register(_head(tmp_path / "a", "one"), "chat")
    for version, reason in (("0002", "has no version"), ("../..", "is no version")):
        with pytest.raises(RegistryError, match=reason):
            registry.promote("chat", version)


def test_a_broken_pointer_is_refused_and_not_guessed(
    registry: HeadRegistry, tmp_path: Path
) -> None:
    registry.register(_head(tmp_path / "a", "one"), "chat")
    registry.promote("chat", "0001")
    path = registry.root / "chat" / "pointer.json"
    assert json.loads(path.read_text())["current"] == "0001"
    path.write_text('{"current": "00')
    with pytest.raises(RegistryError, match=r"pointer\.json"):
        registry.resolve("chat")


def _register(root: Path, folder: Path) -> None:
    HeadRegistry(root).register(folder, "chat")


def test_programs_that_register_at_once_get_different_versions(
    registry: HeadRegistry, tmp_path: Path
) -> None:
    folders = [_head(tmp_path / str(index), str(index)) for index in range(6)]
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=_register, args=(registry.root, folder)) for folder in folders
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    versions = registry.versions("chat")
    assert [v.version for v in versions] == [f"{index:04d}" for index in range(1, 7)]
    assert {v.fingerprint for v in versions} == {head_fingerprint(f) for f in folders}


def _promote_once(root: Path) -> None:
    HeadRegistry(root).promote("chat", "0002", reason={"by": os.getpid()}, once="trial")


def test_of_many_programs_that_promote_the_same_once_one_does(tmp_path: Path) -> None:
    registry = HeadRegistry(tmp_path / "registry")
    for content in ("old", "new"):
        registry.register(_head(tmp_path / content, content), "chat")
    registry.promote("chat", "0001")
    context = multiprocessing.get_context("fork")
    programs = [context.Process(target=_promote_once, args=(registry.root,)) for _ in range(4)]
    for program in programs:
        program.start()
    for program in programs:
        program.join()
    pointer = registry.pointer("chat")
    assert (pointer.current, pointer.history, pointer.applied) == ("0002", ("0001",), ("trial",))
    registry.rollback("chat")
    _promote_once(registry.root)
    assert registry.pointer("chat").current == "0001", "a rollback by people holds"
    registry.promote("chat", "0002")
    assert registry.pointer("chat").current == "0002", "people may promote again"
    registry.rollback("chat")
    registry.promote("chat", "0001", once="other")  # it is there already, and is so for good
    registry.promote("chat", "0002")
    assert registry.promote("chat", "0001", once="other").current == "0002"
