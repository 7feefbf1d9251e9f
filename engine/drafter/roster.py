"""The drafters of a running engine: heads come and go between two steps, and no request notices.

A head that is taken out drafts on for the requests that name it and goes when the last of them
has ended. Whoever names it later decodes with what else it names, or plainly: who drafts never
changes what is written, so nothing has to be refused.
"""

from collections.abc import Iterable, Sequence

from engine.config import HeadSource
from engine.cost_table import CostTable
from engine.drafter.chain import DrafterChain
from engine.drafter.head.assembly import MadeHead, ReadyHead
from engine.drafter.head.config import HeadFormatError
from engine.drafter.head.hot_loading import HeadLoader
from engine.live_request import LiveRequest
from engine.speculation import DraftLengths


class DrafterRoster:
    """Of one engine. All but `load` are called from its thread.

    loader: None where the layout gives heads no states. other_costs: of the drafters that are
    no heads and not free.
    """

    def __init__(
        self,
        chain: DrafterChain,
        lengths: DraftLengths,
        loader: HeadLoader | None,
        heads: Sequence[MadeHead],
        other_costs: Sequence[CostTable],
        max_draft_tokens: int,
    ) -> None:
        self._chain = chain
        self._lengths = lengths
        self._loader = loader
        self._heads = {made.drafter.name: made for made in heads}
        self._other_costs = tuple(other_costs)
        self._max_draft_tokens = max_draft_tokens
        self._leaving: set[str] = set()
        self._gone: set[str] = set()
        self._set_costs()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may name from now on, in the order of preference."""
        return tuple(name for name in self._chain.names if name not in self._leaving)

    @property
    def known_names(self) -> frozenset[str]:
        """With those that are leaving or gone, which a request on its way may still name."""
        return frozenset((*self._chain.names, *self._gone))

    def head(self, name: str) -> MadeHead | None:
        """A loaded head, by its drafter's name."""
        return self._heads.get(name)

    def load(self, source: HeadSource) -> ReadyHead:
        """Ready to be added; slow, from any thread. Raises HeadFormatError naming the field."""
        if self._loader is None:
            raise HeadFormatError(
                f"heads.{source.name}: this layout, or a target over several processes, gives a "
                "head no states"
            )
        return self._loader.load(source)

    def add(self, ready: ReadyHead) -> None:
        """For requests that name it. One that is leaving stays, then. Raises ValueError for a
        name that is there, HeadFormatError where the head cannot listen to the target."""
        name = ready.plan.name
        if name in self._leaving:
            self._leaving.remove(name)
            return
        if name in self._chain.names or self._loader is None:
            raise ValueError(f"drafter: {name!r} is there already")
        made = self._loader.attach(ready)
        self._heads[name] = made
        self._chain.add(made.drafter)
        self._gone.discard(name)
        self._set_costs()

    def remove(self, name: str, lives: Iterable[LiveRequest]) -> None:
        """Take a head out once none of `lives` names it. Raises ValueError for one that drafts
        for requests that name none, or is not there."""
        if not self._chain.is_by_name_only(name):
            raise ValueError(f"drafter: {name!r} is none that can be taken out")
        self._leaving.add(name)
        self.drop_unused(lives)

    def drop_unused(self, lives: Iterable[LiveRequest]) -> None:
        """Let those go that are leaving and that nobody names any more."""
        if not self._leaving:
            return
        named = {n for live in lives for n in live.request.speculation.named_drafters or ()}
        for name in self._leaving - named:
            self._chain.remove(name)
            self._heads.pop(name).drafter.close()
            self._leaving.remove(name)
            self._gone.add(name)
            self._set_costs()

    def _set_costs(self) -> None:
        # Rows of one step may be drafted for by different models: the dearest is assumed.
        tables = [*(made.costs for made in self._heads.values()), *self._other_costs]
        dearest = max(tables, key=lambda table: table.forward_seconds(1), default=None)
        self._lengths.change_drafters(self._max_draft_tokens if self._chain.names else 0, dearest)
