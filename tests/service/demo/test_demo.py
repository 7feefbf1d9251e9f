"""The whole demo with a tiny random model: a server of its own, streams, proof and export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.demo.exported import read_exported
from tests.tiny import save_tiny_model

ROOT = Path(__file__).parents[3]
KEYS = {
    "requests",
    "tokens",
    "exact_match",
    "acceptance_length",
    "tokens_per_second_on",
    "tokens_per_second_off",
    "exported_tables",
}


@pytest.mark.thorough  # a server, three decodings of 16 prompts and transformers' own
def test_the_demo_proves_every_token_and_writes_its_tables(tmp_path: Path) -> None:
    target = save_tiny_model(tmp_path / "model", max_tokens=8192)
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "service.demo", "--target", str(target), "--out", str(out)]
    result = subprocess.run(
        [*command, "--max-tokens", "12"],
        cwd=ROOT,
        env={**os.environ, "TANDEM_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every token is equal" in result.stdout
    assert "What to try next" in result.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == KEYS
    assert summary["requests"] == 16
    assert summary["exact_match"] == 1
    assert summary["tokens"] > 16
    assert summary["tokens_per_second_on"] > 0
    assert summary["tokens_per_second_off"] > 0
    tables = read_exported(out / "tables")
    assert summary["exported_tables"] == {name: t.num_rows for name, t in tables.items()}
    assert {"fact_request", "dim_model", "dim_date"} <= set(tables)
    assert tables["fact_request"].num_rows == 3 * 16  # warm-up, off and on
