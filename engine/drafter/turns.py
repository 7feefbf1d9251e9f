"""Whose turn is it to draft? Every row has its own list of drafters, first choice first.

Rows of one step are drafted for together, so the turns are taken by drafters: the next is one
that some row wants now and no other row will want later, and so gets all its rows at once. Where
two rows want two drafters in opposite orders there is none, and one of the two has two turns.
"""

from collections.abc import Sequence


class Turns:
    """Rows by index, and how far each has come in its list."""

    def __init__(self, orders: Sequence[Sequence[str]], preference: Sequence[str]) -> None:
        """orders: of each row. preference: decides where several drafters could be next."""
        self._orders = orders
        self._preference = preference
        self._positions = {index: 0 for index, order in enumerate(orders) if order}

    def take(self) -> tuple[str, list[int]] | None:
        """The next drafter and the rows that it drafts for; None when all lists are at an end."""
        if not self._positions:
            return None
        wanted = {self._orders[index][at] for index, at in self._positions.items()}
        name = wanted.pop() if len(wanted) == 1 else self._choose(wanted)
        rows = [i for i, at in self._positions.items() if self._orders[i][at] == name]
        for index in rows:
            self._positions[index] += 1
            if self._positions[index] == len(self._orders[index]):
                del self._positions[index]
        return name, rows

    def finish(self, index: int) -> None:
        """The row has its drafts."""
        self._positions.pop(index, None)

    def _choose(self, wanted: set[str]) -> str:
        later = {
            name for index, at in self._positions.items() for name in self._orders[index][at + 1 :]
        }
        candidates = [name for name in self._preference if name in wanted]
        return next((name for name in candidates if name not in later), candidates[0])
