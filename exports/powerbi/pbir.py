"""The report as PBIR files: one folder per page, one per visual, and the theme."""

import json
from typing import Any

from exports.powerbi.pages import GRID_COLUMNS, GRID_ROWS, SLICERS, Field, Page, Visual
from exports.powerbi.report_pages import PAGES

_BASE = "https://developer.microsoft.com/json-schemas/fabric/item/report/definition"
THEME_NAME = "Tandem"
_THEME_FILE = "Tandem.json"

WIDTH, HEIGHT = 1280, 720
_MARGIN, _GAP = 16, 8
_HEADER = 48
_SLICER_WIDTH = 184

COLORS = ("#1F6FB2", "#E07B39", "#3A9A6E", "#B0476A", "#7A5FB0", "#5B6B7A", "#C9A227", "#2FA7B8")

THEME = {
    "name": THEME_NAME,
    "dataColors": list(COLORS),
    "background": "#FFFFFF",
    "foreground": "#1F2933",
    "tableAccent": COLORS[0],
    "good": COLORS[2],
    "bad": COLORS[3],
    "neutral": COLORS[6],
    "textClasses": {
        "title": {"fontFace": "Segoe UI Semibold", "fontSize": 11, "color": "#1F2933"},
        "label": {"fontFace": "Segoe UI", "fontSize": 9, "color": "#52606D"},
        "callout": {"fontFace": "Segoe UI Semibold", "fontSize": 22, "color": "#1F2933"},
    },
}


def report_files() -> dict[str, str]:
    """Path below the report's folder -> content."""
    files = {
        "definition.pbir": _json(
            {
                "$schema": "https://developer.microsoft.com/json-schemas/fabric/item/report/"
                "definitionProperties/2.0.0/schema.json",
                "version": "4.0",
                "datasetReference": {"byPath": {"path": "../Tandem.SemanticModel"}},
            }
        ),
        "definition/version.json": _json(
            {"$schema": f"{_BASE}/versionMetadata/1.0.0/schema.json", "version": "2.0.0"}
        ),
        "definition/report.json": _json(_report()),
        "definition/pages/pages.json": _json(
            {
                "$schema": f"{_BASE}/pagesMetadata/1.1.0/schema.json",
                "pageOrder": [page.name for page in PAGES],
                "activePageName": PAGES[0].name,
            }
        ),
        f"StaticResources/RegisteredResources/{_THEME_FILE}": _json(THEME),
    }
    for page in PAGES:
        files |= _page(page)
    return files


def _report() -> dict[str, Any]:
    return {
        "$schema": f"{_BASE}/report/3.3.0/schema.json",
        "themeCollection": {
            "customTheme": {
                "name": _THEME_FILE,
                "reportVersionAtImport": {"visual": "2.9.0", "report": "3.3.0", "page": "2.1.0"},
                "type": "RegisteredResources",
            }
        },
        "resourcePackages": [
            {
                "name": "RegisteredResources",
                "type": "RegisteredResources",
                "items": [{"name": _THEME_FILE, "path": _THEME_FILE, "type": "CustomTheme"}],
            }
        ],
    }


def _page(page: Page) -> dict[str, str]:
    folder = f"definition/pages/{page.name}"
    files = {
        f"{folder}/page.json": _json(
            {
                "$schema": f"{_BASE}/page/2.1.0/schema.json",
                "name": page.name,
                "displayName": page.title,
                "displayOption": "FitToPage",
                "height": HEIGHT,
                "width": WIDTH,
            }
        )
    }
    visuals = [_header(page), *(_slicer(page, index) for index in range(len(SLICERS)))]
    visuals += [_visual(page, index, visual) for index, visual in enumerate(page.visuals)]
    for order, visual in enumerate(visuals):
        visual["position"] |= {"z": order, "tabOrder": order}
        files[f"{folder}/visuals/{visual['name']}/visual.json"] = _json(visual)
    return files


def _header(page: Page) -> dict[str, Any]:
    style = {"fontSize": "18pt", "fontWeight": "bold"}
    runs = [{"value": f"Tandem - {page.title}", "textStyle": style}]
    return {
        "$schema": f"{_BASE}/visualContainer/2.9.0/schema.json",
        "name": f"{page.name}_header",
        "position": _position(_MARGIN, 4, WIDTH - 2 * _MARGIN, _HEADER - 4),
        "visual": {
            "visualType": "textbox",
            "objects": {"general": [{"properties": {"paragraphs": [{"textRuns": runs}]}}]},
        },
    }


def _slicer(page: Page, index: int) -> dict[str, Any]:
    field = SLICERS[index]
    height = 104 if index == 0 else 168
    top = _HEADER + (0 if index == 0 else 104 + _GAP + (index - 1) * (168 + _GAP))
    mode = "Between" if index == 0 else "Dropdown"
    return {
        "$schema": f"{_BASE}/visualContainer/2.9.0/schema.json",
        "name": f"{page.name}_slicer_{field.name.lower()}",
        "position": _position(_MARGIN, top, _SLICER_WIDTH, height),
        "visual": {
            "visualType": "slicer",
            "query": {"queryState": {"Values": {"projections": [_projection(field)]}}},
            "objects": {"data": [{"properties": {"mode": _literal(f"'{mode}'")}}]},
            # The same selection on every page.
            "syncGroup": {
                "groupName": field.name,
                "fieldChanges": True,
                "filterChanges": True,
            },
            "drillFilterOtherVisuals": True,
        },
    }


def _visual(page: Page, index: int, visual: Visual) -> dict[str, Any]:
    left, top = 2 * _MARGIN + _SLICER_WIDTH, _HEADER
    cell_width = (WIDTH - left - _MARGIN) / GRID_COLUMNS
    cell_height = (HEIGHT - top - _MARGIN) / GRID_ROWS
    query_state = {
        role: {"projections": [_projection(field) for field in fields]}
        for role, fields in visual.roles
    }
    title = [{"properties": {"show": _literal("true"), "text": _literal("'" + visual.title + "'")}}]
    hidden_label = {"categoryLabels": [{"properties": {"show": _literal("false")}}]}
    return {
        "$schema": f"{_BASE}/visualContainer/2.9.0/schema.json",
        "name": f"{page.name}_{index:02}",
        "position": _position(
            round(left + visual.column * cell_width),
            round(top + visual.row * cell_height),
            round(visual.width * cell_width) - _GAP,
            round(visual.height * cell_height) - _GAP,
        ),
        "visual": {
            "visualType": visual.kind,
            "query": {"queryState": query_state},
            **({"objects": hidden_label} if visual.kind == "card" else {}),
            "visualContainerObjects": {"title": title},
            "drillFilterOtherVisuals": True,
        },
    }


def _position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "z": 0, "height": height, "width": width, "tabOrder": 0}


def _projection(field: Field) -> dict[str, Any]:
    kind = "Measure" if field.is_measure else "Column"
    source = {"Expression": {"SourceRef": {"Entity": field.table}}, "Property": field.name}
    return {
        "field": {kind: source},
        "queryRef": f"{field.table}.{field.name}",
        "nativeQueryRef": field.name,
    }


def _literal(value: str) -> dict[str, Any]:
    return {"expr": {"Literal": {"Value": value}}}


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
