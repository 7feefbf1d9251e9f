"""What the report shows: pages of cards and charts on a grid, without file formats."""

from dataclasses import dataclass

from exports.powerbi.measures import BY_NAME


@dataclass(frozen=True, slots=True)
class Field:
    """A column or a measure of the model."""

    table: str
    name: str
    is_measure: bool


@dataclass(frozen=True, slots=True)
class Visual:
    """A visual: `roles` maps a role of its type (Category, Y, Series, Values) to fields.

    column and row are the place on the page's grid, in cells; width and height its size.
    """

    kind: str
    title: str
    roles: tuple[tuple[str, tuple[Field, ...]], ...]
    column: int
    row: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Page:
    """A page. `name` is its folder; cards stand in the first row, charts below."""

    name: str
    title: str
    visuals: tuple[Visual, ...]


GRID_COLUMNS = 12
CARD_ROWS = 2  # grid rows that the cards take
GRID_ROWS = 14

LINE, AREA, COLUMNS, BARS = "lineChart", "stackedAreaChart", "clusteredColumnChart", "barChart"
STACKED = "columnChart"

# Places on the grid: column, row, width, height.
TOP_LEFT, TOP_RIGHT = (0, 2, 6, 6), (6, 2, 6, 6)
LOW_LEFT, LOW_RIGHT = (0, 8, 6, 6), (6, 8, 6, 6)
TOP_WIDE, LOW_WIDE = (0, 2, 12, 6), (0, 8, 12, 6)

DATE = Field("Date", "Date", False)
MODEL = Field("Model", "Model", False)
TENANT = Field("Tenant", "Tenant", False)
VARIANT = Field("Variant", "Variant", False)
DRAFTER = Field("Drafter", "Drafter", False)
OUTCOME = Field("Outcome", "Outcome", False)
HOUR = Field("Time Band", "Hour", False)
WEEKDAY = Field("Date", "Weekday Name", False)
POSITION = Field("Acceptance", "Position", False)
VERDICT = Field("Equivalence", "Verdict", False)
SLICERS = (DATE, MODEL, TENANT, VARIANT)


def measure(name: str) -> Field:
    """A measure by its name, which is unique in the model."""
    return Field(BY_NAME[name].table, name, True)


def cards(*names: str) -> tuple[Visual, ...]:
    width = GRID_COLUMNS // len(names)
    return tuple(
        Visual("card", name, (("Values", (measure(name),)),), index * width, 0, width, CARD_ROWS)
        for index, name in enumerate(names)
    )


def chart(
    kind: str,
    title: str,
    category: Field,
    measures: tuple[str, ...],
    place: tuple[int, int, int, int],
    series: Field | None = None,
) -> Visual:
    roles: list[tuple[str, tuple[Field, ...]]] = [
        ("Category", (category,)),
        ("Y", tuple(measure(name) for name in measures)),
    ]
    if series is not None:
        roles.append(("Series", (series,)))
    return Visual(kind, title, tuple(roles), *place)


def table(title: str, fields: tuple[Field, ...], place: tuple[int, int, int, int]) -> Visual:
    return Visual("tableEx", title, (("Values", fields),), *place)
