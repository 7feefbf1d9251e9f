"""One HTML file with the pages of the Power BI report, readable without Power BI or a network."""

import html
from datetime import datetime
from pathlib import Path
from typing import Any

from exports.duck import open_export
from exports.errors import TargetError
from exports.manifest import read_manifest
from exports.powerbi.measures import BY_NAME
from exports.powerbi.pages import GRID_COLUMNS, Page, Visual
from exports.powerbi.pbir import COLORS
from exports.powerbi.report_pages import PAGES
from exports.report.data import Grouping, measure_rows, measure_value
from exports.report.figures import figure
from exports.schemas import TABLES
from exports.storage import Target

_ROW_PIXELS = 52

_STYLE = f"""
body {{ font-family: 'Segoe UI', system-ui, sans-serif; margin: 0; color: #1f2933;
  background: #f5f7fa; }}
header {{ padding: 16px 24px; background: #fff; border-bottom: 1px solid #e4e7eb;
  position: sticky; top: 0; z-index: 2; }}
h1 {{ font-size: 20px; margin: 0 0 6px; }} h2 {{ font-size: 18px; margin: 32px 24px 8px; }}
header p {{ margin: 0 0 8px; color: #52606d; font-size: 13px; }}
nav a {{ margin-right: 16px; color: {COLORS[0]}; text-decoration: none; font-size: 14px; }}
section {{ scroll-margin-top: 110px; }}
.grid {{ display: grid; grid-template-columns: repeat({GRID_COLUMNS}, 1fr); gap: 12px;
  grid-auto-rows: {_ROW_PIXELS}px; padding: 0 24px; }}
.tile {{ background: #fff; border: 1px solid #e4e7eb; border-radius: 6px; overflow: auto;
  min-width: 0; }}
.card {{ padding: 10px 14px; }} .card b {{ display: block; font-size: 24px; font-weight: 600; }}
.card span {{ color: #52606d; font-size: 12px; }}
h3 {{ font-size: 13px; margin: 10px 14px 0; }}
table {{ border-collapse: collapse; font-size: 12px; margin: 8px 14px; }}
th, td {{ padding: 3px 12px 3px 0; text-align: right; border-bottom: 1px solid #eef1f4; }}
th:first-child, td:first-child {{ text-align: left; }}
"""


def write_report(export: Path, out: Path) -> None:
    """Write the page. Raises TargetError when there is no export or the file cannot be written."""
    connection = open_export(export)
    try:
        for name in TABLES:  # read each file once, not once per chart
            connection.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM main.{name}")  # noqa: S608
        published_at = read_manifest(Target(export)).published_at
        text = _document(connection, published_at)
    finally:
        connection.close()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot write {out}: {error}") from error


def formatted(value: Any, pattern: str) -> str:
    """A value as the measure's format shows it."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    number = float(value)
    positive = pattern.split(";")[0]
    decimals = len(positive.rstrip("%").partition(".")[2])
    if positive.endswith("%"):
        sign = "+" if positive.startswith("+") else ""
        return f"{number * 100:{sign}.{decimals}f}%"
    dollar = "$" if "$" in positive else ""
    return f"{dollar}{number:,.{decimals}f}"


def _document(connection: Any, published_at: datetime | None) -> str:
    from plotly.offline import get_plotlyjs

    links = "".join(f'<a href="#{page.name}">{html.escape(page.title)}</a>' for page in PAGES)
    stand = f"{published_at:%Y-%m-%d %H:%M} UTC" if published_at else "unknown"
    body = "".join(_page(connection, page) for page in PAGES)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Tandem</title>'
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>"
        f"<header><h1>Tandem</h1><p>Export published {stand}; all times UTC.</p>"
        f"<nav>{links}</nav></header>{body}</body></html>\n"
    )


def _page(connection: Any, page: Page) -> str:
    tiles = "".join(_tile(connection, visual) for visual in page.visuals)
    title = html.escape(page.title)
    return f'<section id="{page.name}"><h2>{title}</h2><div class="grid">{tiles}</div></section>'


def _tile(connection: Any, visual: Visual) -> str:
    area = (
        f"grid-column: {visual.column + 1} / span {visual.width};"
        f"grid-row: {visual.row + 1} / span {visual.height}"
    )
    kind = "card" if visual.kind == "card" else "chart"
    return f'<div class="tile {kind}" style="{area}">{_content(connection, visual)}</div>'


def _content(connection: Any, visual: Visual) -> str:
    roles = dict(visual.roles)
    if visual.kind == "card":
        [field] = roles["Values"]
        measure = BY_NAME[field.name]
        shown = formatted(measure_value(connection, field.name), measure.format)
        hint = html.escape(measure.description, quote=True)
        return f'<b title="{hint}">{shown}</b><span>{html.escape(field.name)}</span>'
    if visual.kind == "tableEx":
        return f"<h3>{html.escape(visual.title)}</h3>{_table(connection, visual)}"
    groupings = [Grouping.of(f) for f in (*roles["Category"], *roles.get("Series", ()))]
    names = [field.name for field in roles["Y"]]
    rows = measure_rows(connection, groupings, names)
    plot = figure(visual.kind, names, rows, has_series=len(groupings) > 1)
    plot.update_layout(height=visual.height * _ROW_PIXELS + (visual.height - 1) * 12 - 40)
    chart: str = plot.to_html(
        full_html=False, include_plotlyjs=False, config={"displayModeBar": False}
    )
    return f"<h3>{html.escape(visual.title)}</h3>{chart}"


def _table(connection: Any, visual: Visual) -> str:
    [(_, fields)] = visual.roles
    groupings = [Grouping.of(field) for field in fields if not field.is_measure]
    names = [field.name for field in fields if field.is_measure]
    head = "".join(f"<th>{html.escape(field.name)}</th>" for field in fields)
    body = []
    for row in measure_rows(connection, groupings, names):
        labels = [html.escape(str(value)) for value in row[: len(groupings)]]
        values = [
            formatted(value, BY_NAME[name].format)
            for name, value in zip(names, row[len(groupings) :], strict=True)
        ]
        body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in labels + values) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
