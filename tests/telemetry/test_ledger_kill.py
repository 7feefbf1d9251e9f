"""kill -9 at random moments: no acknowledged request is lost, none is doubled, none stays open."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.ledger.session import migrate


def kill_repeatedly(url: str, folder: Path, num_kills: int, seed: int) -> dict[str, int]:
    module = "tests.telemetry.killed_writer"
    done = subprocess.run(
        [sys.executable, "-m", module, url, str(folder), str(num_kills), str(seed)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


def test_killed_writers_lose_and_double_nothing(ledger_url: str, tmp_path: Path) -> None:
    result = kill_repeatedly(ledger_url, tmp_path / "journal", 3, seed=1)
    assert result["acknowledged"] > 50
    assert (result["lost"], result["duplicated"], result["left_open"]) == (0, 0, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    migrate(url)
    result = kill_repeatedly(url, tmp_path / "journal", 200, seed=2)
    assert result["kills"] == 200
    assert result["acknowledged"] > 10 * 200
    assert (result["lost"], result["duplicated"], result["left_open"]) == (0, 0, 0)
