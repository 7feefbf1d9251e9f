"""`tandem ledger`: each command on a real ledger, with its exit codes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from service.cli_ledger import app
from telemetry.ledger.journal import Journal
from telemetry.ledger.session import open_ledger
from telemetry.ledger.store import LedgerStore
from tests.telemetry.ledger_records import request_record

runner = CliRunner()


def _call(url: str, *arguments: str) -> tuple[int, str]:
    result = runner.invoke(app, [arguments[0], "--ledger", url, *arguments[1:]])
    return result.exit_code, " ".join(result.output.split())


def test_a_ledger_is_migrated_checked_and_counted(empty_url: str) -> None:
    assert _call(empty_url, "check")[0] == 1
    code, output = _call(empty_url, "stats")
    assert code == 1
    assert "tandem ledger migrate" in output
    assert _call(empty_url, "migrate")[0] == 0
    assert _call(empty_url, "migrate")[0] == 0
    engine = open_ledger(empty_url)
    LedgerStore(engine).write([request_record("a"), request_record("b")], may_exist=False)
    engine.dispose()
    code, output = _call(empty_url, "stats")
    assert code == 0
    assert "num_requests 2" in output
    assert "completed 2" in output
    assert "energy_microjoules unknown" in output
    assert _call(empty_url, "check")[0] == 0


def test_pruning_needs_an_export_or_a_word(ledger_url: str) -> None:
    engine = open_ledger(ledger_url)
    LedgerStore(engine).write([request_record("a")], may_exist=False)
    engine.dispose()
    code, output = _call(ledger_url, "prune")
    assert code == 1
    assert "tandem export" in output
    code, output = _call(ledger_url, "prune", "--keep-days", "1", "--exported-through", "1")
    assert code == 0
    assert "deleted 1 requests" in output


def test_a_journal_is_replayed_and_a_locked_one_is_left(ledger_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with Journal(folder) as journal:
        journal.append([request_record("a"), request_record("b")])
        code, output = _call(ledger_url, "replay-journal", "--journal", str(folder))
        assert code == 1
        assert "belongs to a server" in output
    code, output = _call(ledger_url, "replay-journal", "--journal", str(folder))
    assert code == 0
    assert "2 records written, 0 set aside" in output
    assert "num_requests 2" in _call(ledger_url, "stats")[1]


def test_all_journals_of_the_home_are_replayed(
    ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    for index in range(2):
        with Journal(tmp_path / "journal" / str(index)) as journal:
            journal.append([request_record(f"r{index}")])
    with Journal(tmp_path / "journal" / "2") as of_a_running_server:
        of_a_running_server.append([request_record("r2")])
        code, output = _call(ledger_url, "replay-journal")
        assert not of_a_running_server.is_empty
    assert code == 0
    assert "2: left to the server that runs" in output
    assert "num_requests 2" in _call(ledger_url, "stats")[1]


def test_a_database_that_does_not_answer_has_its_own_exit_code(tmp_path: Path) -> None:
    assert _call("postgresql://nobody@127.0.0.1:1/none", "stats")[0] == 3
    assert _call("mysql://x/y", "stats")[0] == 1
