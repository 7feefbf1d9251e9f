"""The page of numbers says what the files say, and leaves out what they do not."""

import json
import re
from pathlib import Path

import pytest

from tests.benchmarks.numbers import NUMBERS, markdown

ROOT = Path(__file__).resolve().parents[2]


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value - 0.1, "max": value + 0.1}


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    peers = {
        "plain_over_best_torch_peer": {"8": spread(1.25), "16": spread(1.5), "1": spread(1.0)},
        "speculative_over_plain": {
            "1": {"spec_bench": spread(1.4), "summary": spread(2.1)},
            "8": {"spec_bench": spread(0.99)},
        },
        "versions": {"peer": {"engine": "7.1"}},
        "peers": {
            "spec_bench@1": {"peer": [{"tokens_per_second": r} for r in (30.0, 10.0, 20.0)]},
            "spec_bench@8": {"tandem_plain": [{"tokens_per_second": 90.0}]},
        },
    }
    (tmp_path / "peers.json").write_text(json.dumps(peers))
    (tmp_path / "ledger.json").write_text(json.dumps({"lost": 0, "duplicated": 0, "kills": 9}))
    return tmp_path


def test_numbers_stand_beside_their_commands(bench: Path) -> None:
    lines = markdown(bench).splitlines()
    best = next(line for line in lines if "fastest torch peer" in line)
    assert "| 1.00 at 1, 1.25 at 8, 1.50 at 16 | `make bench-peers` |" in best
    least = next(line for line in lines if "the least that" in line)
    assert "0.99 (spec_bench at 8)" in least
    assert any("0 in 9 kills" in line for line in lines)


def test_rates_are_medians_with_a_version(bench: Path) -> None:
    lines = markdown(bench).splitlines()
    assert "| peer | 20 |  | engine 7.1 |" in lines
    assert "| tandem_plain |  | 90 |  |" in lines


def test_what_was_not_measured_is_left_out(bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = markdown(bench)
    assert "rows per second" not in text  # the ledger's file has none
    assert "shipped head" not in text
    assert "rows per second" in capsys.readouterr().err
    assert markdown(bench / "nowhere").count("\n") == 1


def test_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {number.command.removeprefix("make ") for number in NUMBERS} <= targets
