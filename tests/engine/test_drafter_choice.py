"""Which drafters a request gets: the server's own, the one it names, or those it may use."""

from collections.abc import Sequence

import pytest

from engine.drafter.base import NO_PROPOSAL, DraftJob, Proposal
from engine.drafter.chain import DrafterChain
from engine.live_request import LiveRequest
from engine.request import GenerationRequest, SpeculationParams


class _Constant:
    """Proposes one token for the prompts that it likes."""

    def __init__(self, name: str, token_id: int, *, likes: bool = True) -> None:
        self.name = name
        self._token_id = token_id
        self._likes = likes

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        proposal = Proposal((self._token_id,), drafter=self.name) if self._likes else NO_PROPOSAL
        return [proposal] * len(jobs)

    def forget(self, request_id: str) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def _chosen(chain: DrafterChain, **speculation: object) -> str:
    request = GenerationRequest(
        "a",
        (5, 6),
        speculation=SpeculationParams(**speculation),  # type: ignore[arg-type]
    )
    job = DraftJob(LiveRequest(request, [5, 6]), 1, 4)
    return chain.propose([job])[0].drafter


@pytest.fixture
def chain() -> DrafterChain:
    lookup = _Constant("prompt_lookup", 1, likes=False)
    return DrafterChain(
        [lookup, _Constant("head", 2)], [_Constant("head:a", 3), _Constant("head:b", 4)]
    )


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, "head"),
        ({"drafter": "head:b"}, "head:b"),
        ({"drafters": ("prompt_lookup", "head:b")}, "head:b"),
        ({"drafters": ("head:b", "head:a")}, "head:b"),
        ({"drafters": ("head:a", "head:b")}, "head:a"),
        ({"drafters": ("gone", "head:a")}, "head:a"),
        ({"drafters": ("prompt_lookup",)}, ""),
        ({"drafters": ()}, ""),
        ({"drafter": "head", "drafters": ("head:a",)}, "head"),
    ],
)
def test_a_request_is_drafted_for_by_those_it_may_use_in_its_own_order(
    chain: DrafterChain, speculation: dict[str, object], expected: str
) -> None:
    assert _chosen(chain, **speculation) == expected
