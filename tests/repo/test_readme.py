"""What the README tells people to type exists, and runs where it is cheap."""

import asyncio
import re
import shlex
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from google.protobuf import json_format

from service.pb import generation_pb2 as pb
from tests.exports.ledgers import NOON, LedgerFill, new_ledger
from tests.service.serving import running_server

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TANDEM = Path(sys.executable).with_name("tandem")
CHEAP = ("--help", "models list")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _commands(program: str) -> list[list[str]]:
    lines = "\n".join(_blocks("sh")).replace("\\\n", " ").splitlines()
    words = (shlex.split(line, comments=True) for line in lines)
    return [w for w in words if w and w[0] == program]


def _ids(words: list[str]) -> str:
    return " ".join(words)


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("words", _commands("make"), ids=_ids)
def test_make_commands_have_a_recipe(words: list[str]) -> None:
    result = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("words", _commands("tandem"), ids=_ids)
def test_tandem_commands_know_their_options(words: list[str], tmp_path: Path) -> None:
    if " ".join(words[1:]) in CHEAP:
        result = _tandem(words[1:], tmp_path)
        assert result.returncode == 0, result.stderr
        return
    options = {w.split("=")[0] for w in words[1:] if w.startswith("-")}
    plain = [w for w in words[1:] if not w.startswith("-")]
    result = _tandem([*_command_path(plain), "--help"], tmp_path)
    assert result.returncode == 0, result.stderr
    known = set(re.findall(r"--?[a-z][a-z-]*", result.stdout))
    assert options <= known


def test_commands_that_read_a_ledger_run_as_they_are_written(tmp_path: Path) -> None:
    ledger = LedgerFill(new_ledger(tmp_path))
    ledger.dimensions()
    ledger.request(NOON)
    readers = [w for w in _commands("tandem") if w[1] in {"export", "report", "ledger"}]
    assert len(readers) >= 3
    for words in readers:
        result = _tandem(words[1:], tmp_path, folder=tmp_path)
        assert result.returncode == 0, (words, result.stderr)
    assert (tmp_path / "build" / "tables" / "report.html").is_file()


def test_the_table_of_make_targets_is_true() -> None:
    documented = set(re.findall(r"^\| `make ([a-z0-9-]+)`", README, re.MULTILINE))
    assert {"setup", "demo", "test", "test-model", "check"} <= documented
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    described = set(re.findall(r"^  ([a-z0-9-]+) ", listed, re.MULTILINE))
    assert documented <= described <= _make_targets()


def test_the_life_of_a_request_names_real_files() -> None:
    section = README.split("## Life of a request", 1)[1].split("\n## ", 1)[0]
    paths = set(re.findall(r"`((?:service|engine|telemetry|exports|protos)/[\w./]*)`", section))
    assert len(paths) >= 8
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_links_point_to_files_that_exist() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if "://" not in t]
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.mark.parametrize("block", _blocks("python"))
async def test_python_examples_run_against_a_server(block: str) -> None:
    async with running_server() as server:
        program = block.replace("127.0.0.1:50051", server.address)
        assert program != block
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, cwd=ROOT, stdout=PIPE, stderr=PIPE
        )
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    assert "num_plain_steps" in output.decode() or "num_verify_steps" in output.decode()


def test_the_grpcurl_example_is_a_request_of_the_contract() -> None:
    (example,) = [block for block in _blocks("console") if "grpcurl" in block]
    words = shlex.split(example.replace("\\\n", " "))
    request = json_format.Parse(words[words.index("-d") + 1], pb.GenerateRequest())
    assert request.WhichOneof("prompt") == "text"
    service = pb.DESCRIPTOR.services_by_name["GenerationService"]
    assert words[-1] in {f"{service.full_name}/{method.name}" for method in service.methods}
    assert (ROOT / "protos" / words[words.index("-proto") + 1]).is_file()


def test_the_python_examples_and_shell_blocks_are_found() -> None:
    assert _blocks("python")
    assert len(_commands("make")) >= 2
    assert len(_commands("tandem")) >= 4


def _command_path(words: list[str]) -> list[str]:
    groups = {"models", "ledger", "powerbi", "train", "drafter", "experiment", "audit"}
    return words[:2] if words[0] in groups else words[:1]


def _tandem(
    arguments: list[str], home: Path, *, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [TANDEM, *arguments],
        cwd=folder,
        env={"TANDEM_HOME": str(home), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
