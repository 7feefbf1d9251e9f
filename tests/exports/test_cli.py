"""`tandem export`, `tandem report` and `tandem powerbi` as a person runs them."""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from exports.errors import LockedError, ReconciliationError, SourceError, TargetError
from exports.extract import LedgerSource
from exports.job import ExportOptions, Progress, run_export
from exports.ledger_facts import DayTotals
from exports.lock import exclusive
from exports.manifest import read_manifest
from exports.storage import Target
from service.cli import app
from tests.exports.ledgers import LedgerFill, new_ledger

ROOT = Path(__file__).parents[2]
TODAY = datetime.now(UTC) - timedelta(hours=1)
PROGRAM = "from service.cli import main; main()"


def tandem(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment, prog_name="tandem")


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFill:
    fill = LedgerFill(new_ledger(tmp_path))
    fill.dimensions()
    fill.request(TODAY, drafted=(3,), accepted=(2,))
    return fill


def test_an_export_shows_its_tables_and_writes_metrics(ledger: LedgerFill, tmp_path: Path) -> None:
    out, metrics = tmp_path / "out", tmp_path / "export.prom"
    result = tandem(
        *("export", "--out", str(out), "--metrics-file", str(metrics)),
        TANDEM_LEDGER_URL=ledger.url,
    )
    assert result.exit_code == 0, result.stderr
    assert "fact_request" in result.stdout
    assert "published generation 1" in result.stdout
    lines = metrics.read_text().splitlines()
    assert 'tandem_export_table_rows{table="fact_request"} 1' in lines
    assert "tandem_export_exit_code 0" in lines


def test_a_focus_file_holds_the_cost_of_each_date(ledger: LedgerFill, tmp_path: Path) -> None:
    ledger.request(TODAY - timedelta(days=1), cost_nano_usd=7)
    ledger.interval(TODAY - timedelta(days=1), cost_idle_nano_usd=5)
    out, folder = tmp_path / "out", tmp_path / "focus"
    options = ("--focus", str(folder), "--focus-account", "Acme")
    result = tandem("export", "--out", str(out), "--ledger", ledger.url, *options)
    assert result.exit_code == 0, result.stderr
    days = [f"{TODAY - timedelta(days=back):%Y-%m-%d}" for back in (1, 0)]
    names = [f"focus_cost_and_usage-{day}.csv" for day in days]
    assert sorted(path.name for path in folder.glob("*.csv")) == names
    costs = []
    for name in names:
        rows = list(csv.DictReader((folder / name).read_text().splitlines()))
        assert {row["ServiceProviderName"] for row in rows} == {"Acme"}
        costs.append(sum(Decimal(row["BilledCost"]) for row in rows) * 10**9)
    assert costs == [7 + 5, 1_001]

    # A date is written again, whole, when something of it changed; the others stay.
    before = {name: (folder / name).stat().st_ino for name in names}
    ledger.request(TODAY, cost_nano_usd=9)
    tandem("export", "--out", str(out), "--ledger", ledger.url, *options)
    after = {name: (folder / name).stat().st_ino for name in names}
    assert [before[name] == after[name] for name in names] == [True, False]
    (tmp_path / "file").write_text("")
    nowhere = ("--full", "--focus", str(tmp_path / "file" / "x"))
    result = tandem("export", "--out", str(out), "--ledger", ledger.url, *nowhere)
    assert result.exit_code == TargetError.exit_code


def test_exit_codes_tell_failures_apart(ledger: LedgerFill, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    missing = tandem("export", "--out", out, "--ledger", f"sqlite:///{tmp_path / 'no.db'}")
    assert missing.exit_code == SourceError.exit_code
    assert "there is no ledger" in missing.stderr
    (tmp_path / "file").write_text("")
    nowhere = tandem("export", "--out", str(tmp_path / "file" / "x"), "--ledger", ledger.url)
    assert nowhere.exit_code == TargetError.exit_code
    with exclusive(Target(out), 0):
        locked = tandem("export", "--out", out, "--ledger", ledger.url)
    assert locked.exit_code == LockedError.exit_code
    assert "another export is writing" in locked.stderr
    kinds = (LockedError, SourceError, TargetError, ReconciliationError)
    assert [kind.exit_code for kind in kinds] == [3, 4, 5, 6]


@pytest.mark.thorough
def test_tables_that_would_differ_from_the_ledger_are_not_published(
    ledger: LedgerFill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    tandem("export", "--out", str(out), "--ledger", ledger.url)
    ledger.request(TODAY, cost_nano_usd=5)
    totals_of = LedgerSource.day_totals

    def a_nano_dollar_less(self: LedgerSource, day: date, until: int) -> DayTotals:
        totals = totals_of(self, day, until)
        return replace(totals, cost_nano_usd=totals.cost_nano_usd - 1)

    monkeypatch.setattr(LedgerSource, "day_totals", a_nano_dollar_less)
    metrics = tmp_path / "export.prom"
    result = tandem(
        *("export", "--out", str(out), "--ledger", ledger.url, "--metrics-file", str(metrics))
    )
    assert result.exit_code == ReconciliationError.exit_code
    assert "cost_nano_usd" in result.stderr
    assert f"tandem_export_exit_code {result.exit_code}" in metrics.read_text().splitlines()
    assert read_manifest(Target(out)).num_rows("fact_request") == 1


@pytest.mark.thorough
def test_a_terminal_shows_how_far_it_is(ledger: LedgerFill, tmp_path: Path) -> None:
    ledger.request(TODAY - timedelta(days=1))
    ledger.interval(TODAY)
    command = ("export", "--out", str(tmp_path / "out"), "--ledger", ledger.url)
    shown = tandem(*command, "--workers", "1", FORCE_COLOR="1", COLUMNS="120")
    assert shown.exit_code == 0, shown.stderr
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.stderr)
    assert "Exporting" in text
    assert "3/3 days, 2 requests" in text  # two of requests, one of capacity
    # A log file gets the result alone.
    assert "Exporting" not in tandem(*command, "--full").stderr


@pytest.mark.thorough
def test_of_two_runs_at_once_one_leaves_or_waits(ledger: LedgerFill, tmp_path: Path) -> None:
    out = tmp_path / "out"
    is_running, may_end = threading.Event(), threading.Event()

    def hold(_: Progress) -> None:
        is_running.set()
        may_end.wait()

    with ThreadPoolExecutor() as pool:
        first = pool.submit(run_export, ledger.url, out, on_progress=hold)
        is_running.wait()
        leaves = tandem("export", "--out", str(out), "--ledger", ledger.url)
        options = ExportOptions(wait_seconds=60, full=True)
        waits = pool.submit(run_export, ledger.url, out, options)
        may_end.set()
    assert leaves.exit_code == LockedError.exit_code
    assert first.result().generation == 1
    assert waits.result().rewritten_dates == (TODAY.date(),)


def test_a_ledger_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    import sqlite3

    sqlite3.connect(tmp_path / "empty.db").execute("CREATE TABLE x (y)").connection.close()
    result = tandem(
        *("export", "--out", str(tmp_path / "out")),
        *("--ledger", f"sqlite:///{tmp_path / 'empty.db'}"),
    )
    assert result.exit_code == SourceError.exit_code
    assert "tandem ledger migrate" in result.stderr


def test_watching_publishes_what_arrives_and_ends_on_sigterm(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "export", "--watch", "1", "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_LEDGER_URL": ledger.url},
    )
    try:
        wait_for_rows(out, 1)
        ledger.request(TODAY)
        wait_for_rows(out, 2)
    finally:
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0


def wait_for_rows(out: Path, num_rows: int) -> None:
    deadline = time.monotonic() + 60
    while read_manifest(Target(out)).num_rows("fact_request") < num_rows:
        assert time.monotonic() < deadline, "not published"
        time.sleep(0.1)


def test_since_and_full_rewrite_what_they_say(ledger: LedgerFill, tmp_path: Path) -> None:
    old = TODAY - timedelta(days=60)
    ledger.request(old)
    out = str(tmp_path / "out")
    tandem("export", "--out", out, "--ledger", ledger.url)
    options = (
        (("--since", f"{TODAY - timedelta(days=2):%Y-%m-%d}"), 1),
        (("--since", f"{old:%Y-%m-%d}"), 2),
        (("--full",), 2),
        ((), 0),
    )
    for arguments, num_dates in options:
        result = tandem("export", "--out", out, "--ledger", ledger.url, *arguments)
        assert f"{num_dates} dates rewritten" in result.stdout, (arguments, result.stdout)


@pytest.mark.parametrize(
    "option", [("--delta", "x"), ("--focus", "x"), ("--watch", "5"), ("--full",)], ids=" ".join
)
def test_what_a_sample_cannot_do_is_refused_by_name(
    option: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = tandem("export", "--sample", "azure", "--out", str(out), *option, COLUMNS="200")
    assert result.exit_code == 2
    assert f"cannot be used with {option[0]}" in result.stderr
    assert not out.exists()


def test_an_export_loads_no_torch(ledger: LedgerFill, tmp_path: Path) -> None:
    program = (
        "import sys; from service.cli import app;"
        "app(standalone_mode=False); sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "export", "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_LEDGER_URL": ledger.url},
    )
    assert result.returncode == 0, result.stderr


def test_a_report_and_a_power_bi_project_come_from_an_export(
    ledger: LedgerFill, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tandem("export", "--out", str(out), "--ledger", ledger.url)
    report = tandem("report", str(out))
    assert report.exit_code == 0, report.stderr
    assert (out / "report.html").stat().st_size > 1_000_000
    project = tandem("powerbi", "init", "--root", str(out), "--out", str(tmp_path / "bi"))
    assert project.exit_code == 0, project.stderr
    assert (tmp_path / "bi" / "Tandem.pbip").exists()
