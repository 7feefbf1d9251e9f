"""The charts of the HTML report, in the theme of the Power BI report."""

from collections.abc import Sequence
from datetime import date
from typing import Any

from exports.powerbi.pages import AREA, BARS, LINE, STACKED
from exports.powerbi.pbir import COLORS

# A row: the category, the series where there is one, then the measures.
Rows = Sequence[tuple[Any, ...]]
_FEW = 14


def figure(kind: str, measures: Sequence[str], rows: Rows, *, has_series: bool) -> Any:
    """A Plotly figure of one of the report's kinds of chart."""
    from plotly import graph_objects

    chart = graph_objects.Figure()
    for index, (name, categories, values) in enumerate(_traces(measures, rows, has_series)):
        color = COLORS[index % len(COLORS)]
        if kind in (LINE, AREA):
            chart.add_scatter(
                x=categories,
                y=values,
                name=name,
                # A line of one point is none: where there are few, each is drawn.
                mode="lines+markers" if len(categories) <= _FEW else "lines",
                line={"color": color, "width": 2},
                stackgroup="all" if kind == AREA else None,
            )
        elif kind == BARS:
            chart.add_bar(x=values, y=categories, name=name, orientation="h", marker_color=color)
        else:
            chart.add_bar(x=categories, y=values, name=name, marker_color=color)
    chart.update_layout(
        barmode="stack" if kind in (STACKED, BARS) else "group",
        template="plotly_white",
        margin={"l": 48, "r": 16, "t": 8, "b": 32},
        legend={"orientation": "h", "y": 1.12, "x": 0},
        showlegend=len(chart.data) > 1,
        font={"family": "Segoe UI, system-ui, sans-serif", "size": 11},
        hovermode="x unified" if kind != BARS else "closest",
    )
    if kind == BARS:
        chart.update_layout(margin_l=180)
    elif (days := _few_days(rows)) is not None:
        chart.update_xaxes(tickvals=days, tickformat="%b %-d, %Y")
    return chart


def _few_days(rows: Rows) -> list[date] | None:
    """The categories where they are some days: an axis must not count milliseconds then."""
    found = sorted({row[0] for row in rows if isinstance(row[0], date)})
    return found if 0 < len(found) <= _FEW else None


def _traces(
    measures: Sequence[str], rows: Rows, has_series: bool
) -> list[tuple[str, list[Any], list[Any]]]:
    if not has_series:
        return [
            (name, [row[0] for row in rows], [_plain(row[1 + index]) for row in rows])
            for index, name in enumerate(measures)
        ]
    by_series: dict[str, tuple[list[Any], list[Any]]] = {}
    for category, series, *values in rows:
        categories, numbers = by_series.setdefault(str(series), ([], []))
        categories.append(category)
        numbers.append(_plain(values[0]))
    return [(name, *lists) for name, lists in sorted(by_series.items())]


def _plain(value: Any) -> float | None:
    return None if value is None else float(value)
