"""The HTML report shows the export's numbers, needs no network and survives hostile names."""

import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from exports.errors import TargetError
from exports.job import run_export
from exports.powerbi.pages import AREA, LINE
from exports.powerbi.report_pages import PAGES
from exports.report.data import Grouping, measure_rows
from exports.report.figures import figure
from exports.report.page import formatted, write_report
from telemetry.ledger.session import open_ledger
from tests.exports.ledgers import NOON, LedgerFill, new_ledger

pytestmark = pytest.mark.thorough

NOW = datetime(2026, 4, 2, 9, 0, tzinfo=UTC)


@pytest.fixture
def export(tmp_path: Path) -> Path:
    ledger = LedgerFill(new_ledger(tmp_path))
    ledger.dimensions()
    for index in range(8):
        ledger.request(
            NOON + timedelta(days=index % 3, hours=index),
            drafted=(3, 2),
            accepted=(2, 1),
            variant_key=1 + index % 2,
            model_key=1 + index % 2,
        )
    ledger.interval(NOON)
    ledger.audit(NOON)
    with open_ledger(ledger.url).begin() as connection:
        connection.execute(text("UPDATE models SET name = '<script>alert(1)</script>'"))
    run_export(ledger.url, tmp_path / "out", now=NOW)
    return tmp_path / "out"


def test_every_page_and_card_is_shown(export: Path, tmp_path: Path) -> None:
    write_report(export, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    for report_page in PAGES:
        assert f'id="{report_page.name}"' in page
    assert re.search(r"<b title=[^>]*>8</b><span>Requests</span>", page)
    assert re.search(r"<b title=[^>]*>60\.0%</b><span>Acceptance Rate</span>", page)
    assert "2026-04-02 09:00 UTC" in page


def test_nothing_is_loaded_and_no_name_becomes_markup(export: Path, tmp_path: Path) -> None:
    write_report(export, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_chart_shows_what_the_ledger_holds(export: Path) -> None:
    from exports.duck import open_export
    from exports.powerbi.pages import DATE, VARIANT

    connection = open_export(export)
    groupings = [Grouping.of(DATE), Grouping.of(VARIANT)]
    rows = measure_rows(connection, groupings, ["Requests", "Acceptance Length"])
    found = {(str(day), variant): (count, length) for day, variant, count, length in rows}
    assert found[("2026-03-28", "default")] == (2, 2.0)
    assert sum(count for count, _ in found.values()) == 8


@pytest.mark.parametrize("kind", [LINE, AREA])
def test_a_single_day_is_seen(kind: str) -> None:
    day = NOON.date()
    chart = figure(kind, ["TTFT P50 (s)"], [(day, 0.4)], has_series=False)
    assert chart.data[0].mode == "lines+markers"
    assert list(chart.layout.xaxis.tickvals) == [day]
    many = [(day + timedelta(days=n), 0.4) for n in range(90)]
    chart = figure(kind, ["TTFT P50 (s)"], many, has_series=False)
    assert chart.data[0].mode == "lines"
    assert chart.layout.xaxis.tickvals is None


def test_values_are_formatted_as_in_power_bi() -> None:
    assert formatted(1234.5, "#,0") in {"1,234", "1,235"}
    assert formatted(0.1234, "0.0%") == "12.3%"
    assert formatted(0.1234, "+0.0%;-0.0%;0.0%") == "+12.3%"
    assert formatted(12.3456, r"\$#,0.00") == "$12.35"
    assert formatted(None, "#,0") == "-"


def test_a_folder_without_export_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="holds no export"):
        write_report(tmp_path, tmp_path / "report.html")


def test_an_empty_export_makes_a_page(tmp_path: Path) -> None:
    run_export(new_ledger(tmp_path), tmp_path / "out", now=NOW)
    write_report(tmp_path / "out", tmp_path / "report.html")
    assert "<span>Requests</span>" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_chromium_draws_every_chart(export: Path, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium: install Debian's `chromium`")
    write_report(export, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    shown = subprocess.run(
        [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"),
            *("--dump-dom", f"file://{tmp_path / 'report.html'}"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    num_charts = page.count("Plotly.newPlot(")
    assert num_charts > 20
    assert shown.count('<svg class="main-svg"') >= num_charts
