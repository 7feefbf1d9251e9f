"""The command line: what it prints where, what it refuses, and what it does not load."""

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli import app
from service.settings import ServiceSettings
from tests.service.serving import running_server
from tests.tiny import save_tiny_model

runner = CliRunner()


@pytest.mark.parametrize("command", ["export", "ledger", "models", "generate", "serve"])
def test_help_of_a_command_loads_no_torch(command: str) -> None:
    code = (
        "import sys; from service.cli import app;"
        f"app([{command!r}, '--help'], standalone_mode=False);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]


def test_every_setting_is_listed() -> None:
    listed = runner.invoke(app, ["serve", "--settings"]).output
    for name in ServiceSettings.model_fields:
        assert f"TANDEM_{name.upper()}=" in listed


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--port", "70000"], "port"),
        (["--dtype", "int3"], "dtype"),
        (["--host", "0.0.0.0"], "not loopback"),  # noqa: S104 - refused
    ],
)
def test_wrong_settings_are_named_and_end_with_2(arguments: list[str], name: str) -> None:
    done = runner.invoke(app, ["serve", *arguments])
    assert done.exit_code == 2
    assert name in done.stderr


def test_missing_model_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    environment = {"TANDEM_HOME": str(tmp_path), "TANDEM_PORT": "0"}
    done = runner.invoke(app, ["serve", "--target", "smollm2-135m-instruct"], env=environment)
    assert done.exit_code == 1
    assert "tandem models pull" in done.stderr
    assert not isinstance(done.exception, Exception) or isinstance(done.exception, SystemExit)


async def tandem(*arguments: str) -> tuple[int, str, str]:
    """Run the command beside this process: exit status, standard output and error."""
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("tandem"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_generate_prints_text_to_stdout_and_figures_to_stderr() -> None:
    async with running_server() as running:
        arguments = ["generate", "hello", "--raw", "--address", running.address]
        status, output, errors = await tandem(*arguments, "--max-tokens", "12")
        wrong_status, _, wrong_errors = await tandem(*arguments, "--top-p", "7")
    assert status == 0
    assert len(output.strip()) == 12  # the fake engine's tokens are one letter each
    assert "12 tokens (length)" in errors
    assert "TTFT" in errors
    assert wrong_status == 1
    assert "sampling.top_p" in wrong_errors


def test_generate_without_a_server_runs_a_private_one(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    environment = {
        "TANDEM_HOME": str(tmp_path),
        "TANDEM_KV_CACHE_MEMORY": "1e8",
        "TANDEM_DTYPE": "float32",
        "TANDEM_QUANTIZATION": "int8",
    }
    arguments = ["generate", "the quick", "--target", str(model), "--max-tokens", "5", "--raw"]
    done = runner.invoke(app, arguments, env=environment)
    assert done.exit_code == 0, done.output
    assert "tokens (" in done.stderr
    assert "float32, int8 weights, bit_exact" in done.stderr
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        assert ledger.execute("SELECT dtype FROM models").fetchall() == [("float32, int8 weights",)]


def test_sigterm_ends_training_outside_of_its_steps_with_a_status_to_go_on_after(
    tmp_path: Path,
) -> None:
    """A container's first process ignores signals that it does not handle."""
    program = (
        "import signal, typer; from service.cli_train_outcome import friendly\n"
        "try:\n"
        "    with friendly():\n"
        "        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "except typer.Exit as ended:\n"
        "    raise SystemExit(ended.exit_code)\n"
    )
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True
    )
    assert ended.returncode == 75, ended.stderr
    assert "go on" in ended.stderr
