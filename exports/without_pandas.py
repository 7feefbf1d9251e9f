"""Keeping pandas out of a process that has no use for it."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Hidden(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)
        return None


def hide_pandas() -> None:
    """From now on, this process imports no pandas.

    Where it is installed (Tandem does not ask for it), pyarrow imports it at the first array, to
    see whether that is one of its series. That takes as long as exporting fifty thousand rows.
    """
    sys.meta_path.insert(0, _Hidden())
