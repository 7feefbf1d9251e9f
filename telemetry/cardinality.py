"""Keeps the number of series that a process makes bounded, whatever names callers send."""

import threading
from collections.abc import Mapping

OTHER = "other"
MAX_VALUES = 16


class BoundedValues:
    """Lets the first values of an attribute pass and turns all later ones into "other"."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self._max_values = max_values
        self._values: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, value: str) -> str:
        if value in self._values:
            return value
        with self._lock:
            if len(self._values) >= self._max_values:
                return OTHER
            self._values.add(value)
        return value


class BoundedSeries:
    """Lets the first series of a metric pass; what comes later is one series, all "other".

    Attributes that are each bounded still multiply. max_series counts that last series, too.
    """

    def __init__(self, max_series: int) -> None:
        self._max_named = max_series - 1
        self._seen: set[tuple[object, ...]] = set()
        self._lock = threading.Lock()

    def __call__(self, attributes: Mapping[str, str | int]) -> Mapping[str, str | int]:
        """The attributes to record with; always given in the same order."""
        key = tuple(attributes.values())
        if key in self._seen:
            return attributes
        with self._lock:
            if len(self._seen) >= self._max_named and key not in self._seen:
                return dict.fromkeys(attributes, OTHER)
            self._seen.add(key)
        return attributes
