"""The script for CUDA machines runs here on the CPU: same sections, small models."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from engine import verifier
from tests.benchmarks import gpu, gpu_checks
from tests.benchmarks.gpu_checks import sync_sites
from tests.benchmarks.gpu_pair import (
    SIZES,
    build_pair,
    measure_agreement,
    reach_agreement,
    scale_further_layers,
)

ROOT = Path(__file__).parents[2]
SMALL = SIZES["small"]
CPU = torch.device("cpu")


@pytest.mark.thorough
@pytest.mark.timeout(480)  # seconds of work, but minutes where other programs hold the processors
def test_the_script_proves_and_measures_on_this_machine(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    finished = subprocess.run(
        ["sh", ROOT / "tests/benchmarks/gpu.sh", "--device", "cpu", "--out", out],
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    result = json.loads(out.read_text())
    equality = result["equality_float32"]
    assert equality["failures"] == []
    assert equality["guarantees"]["ragged"] == "bit_exact"
    assert equality["equal"] == equality["requests"] > 0
    assert equality["verdicts"].get("divergence", 0) == 0
    assert equality["accepted"] > 0
    assert equality["rejected"] > 0
    pair = result["pairs"]["small"]
    assert pair["host_syncs"] == {"off": None, "on": None}  # unknown here, not zero
    assert set(pair["ratios"]) == {"1", "3"}
    for found in pair["ratios"].values():
        assert 1 <= found["acceptance_length"] <= 5
        assert found["on_over_plain"]["median"] > 0
    for phase in pair["limits"]["phases"].values():
        assert phase["limit_seconds"] > 0
        assert phase["forward_seconds"] > 0


def test_the_smaller_epsilon_the_more_often_the_pair_agrees() -> None:
    target, draft = build_pair(SMALL, CPU, torch.float32)
    shares = []
    for factor in (1.0, 0.1, 0.01, 1e-4):
        scale_further_layers(target, SMALL.num_draft_layers, factor)
        shares.append(measure_agreement(target, draft))
    assert shares == sorted(shares)
    assert shares[0] < 0.7 < 0.99 < shares[-1]


@pytest.mark.parametrize("wanted", [0.5, 0.9])
def test_epsilon_is_found_for_a_wanted_agreement(wanted: float) -> None:
    target, draft = build_pair(SMALL, CPU, torch.float32)
    reached = reach_agreement(target, draft, SMALL.num_draft_layers, wanted)
    assert abs(reached.share - wanted) < 0.1
    assert reached.share == measure_agreement(target, draft)


def test_the_draft_model_owns_no_memory_of_its_own() -> None:
    target, draft = build_pair(SMALL, CPU, torch.float32)
    shared = dict(target.named_parameters())
    assert all(p.data_ptr() == shared[n].data_ptr() for n, p in draft.named_parameters())


def test_accepting_every_draft_is_found_by_both_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_checks, "_CASES", (("ragged", 0.5),))
    monkeypatch.setattr(verifier, "accept_coupled", lambda targets, drafts, num_drafts: num_drafts)
    found = gpu_checks.equality(CPU, "float32")
    assert found["equal"] < found["requests"]
    assert found["verdicts"]["divergence"] > 0
    text = " ".join(found["failures"])
    assert "requests differ" in text
    assert "divergences" in text


def test_a_failed_equality_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "equality", lambda device, dtype: {"failures": ["planted"]})
    assert gpu.main(["--device", "cpu", "--seconds", "0", "--out", str(tmp_path / "g.json")]) == 1
    result = json.loads((tmp_path / "g.json").read_text())
    assert result["failures"] == ["float32: planted"]
    assert result["left_out"] == ["small"]
    assert result["pairs"] == {}


def test_a_pair_that_fails_is_reported_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr(gpu, "equality", lambda device, dtype: {"failures": []})
    monkeypatch.setattr(gpu, "measure_pair", fail)
    assert gpu.main(["--device", "cpu", "--out", str(tmp_path / "g.json")]) == 1
    result = json.loads((tmp_path / "g.json").read_text())
    assert result["failures"] == ["small: MemoryError: planted"]
    assert result["equality_float32"] == {"failures": []}


def test_only_warnings_of_synchronisation_count_and_by_their_place() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            warnings.warn_explicit(
                "called a synchronizing CUDA operation", UserWarning,
                str(ROOT / "engine/verifier.py"), 12,
            )  # fmt: skip
        warnings.warn("something else", stacklevel=1)
    assert sync_sites(caught) == {"engine/verifier.py:12": 3}


@pytest.mark.parametrize(
    ("option", "value"), [("--agreement", "1.5"), ("--sizes", "900b")], ids=str
)
def test_bad_options_are_named(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main([option, value])
    assert option in capsys.readouterr().err
