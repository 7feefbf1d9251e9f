"""A drafter that fails or falls short is left out, tried again, and never costs a request."""

from collections.abc import Sequence

import pytest
import torch

from engine.drafter.base import DraftJob, Proposal
from engine.drafter.chain import DrafterChain
from engine.drafter.health import FailureBackOff, MissBackOff
from engine.drafter.prompt_lookup import PromptLookupDrafter
from engine.drafter.suffix import SuffixDrafter
from engine.goodput import DraftSource
from engine.live_request import LiveRequest
from engine.stats import DrafterEvent, DrafterEventKind
from tests.engine.driver import request, run, tiny_engine
from tests.engine.test_equality import generated, prompts


class Always:
    """Proposes one token for every row, or raises."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error = ""
        self.num_calls = 0
        self.forgotten: list[str] = []

    def propose(self, jobs: Sequence[DraftJob]) -> list[Proposal]:
        self.num_calls += 1
        if self.error:
            raise RuntimeError(self.error)
        return [Proposal((7,) * min(1, job.max_drafts), drafter=self.name) for job in jobs]

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)

    def check_integrity(self) -> None: ...


def live(request_id: str = "a", **options: object) -> LiveRequest:
    return LiveRequest(request(request_id, [5, 6, 7], **options), [5, 6, 7, 8])


def drafter_of(chain: DrafterChain, row: LiveRequest) -> str:
    (proposal,) = chain.propose([DraftJob(row, 4, 2)])
    return proposal.drafter


@pytest.mark.parametrize(
    "lookup", [PromptLookupDrafter(min_ngram=1, max_ngram=3), SuffixDrafter(min_match=1)]
)
def test_who_will_draft_is_known_beforehand(
    lookup: PromptLookupDrafter | SuffixDrafter,
) -> None:
    chain = DrafterChain([lookup, Always("model")])
    repeating = LiveRequest(request("repeating", [5, 6, 7, 5]), [5, 6, 7, 5])
    prose = LiveRequest(request("prose", [5, 6, 7, 8]), [5, 6, 7, 8])
    off = LiveRequest(request("off", [5, 6, 7, 5], mode="off"), [5, 6, 7, 5])
    assert chain.foresee(repeating) == DraftSource(lookup.name, is_free=True)
    assert chain.foresee(prose) == DraftSource("model", is_free=False)
    assert chain.foresee(off) is None
    assert DrafterChain([lookup]).foresee(prose) is None
    for row in (repeating, prose):
        assert drafter_of(chain, row) == chain.foresee(row).drafter  # type: ignore[union-attr]
    # Refused too often: this request goes on with the model, and foresight knows it.
    for _ in range(4):
        chain.observe(repeating, lookup.name, 2, 0)
    assert chain.foresee(repeating) == DraftSource("model", is_free=False)


def test_a_failing_drafter_is_tried_again_after_a_pause_that_doubles() -> None:
    now = 0.0
    first, second = Always("first"), Always("second")
    chain = DrafterChain([first, second], clock=lambda: now)
    first.error = "out of order"
    used = []
    for second_number in range(0, 200, 10):
        now = float(second_number)
        used.append(drafter_of(chain, live()))
    assert set(used) == {"second"}
    assert first.num_calls == 3  # at 0, 30 and 30 + 60 seconds; the next would be at 210
    assert chain.failures == {"first": "RuntimeError: out of order"}
    assert [event.kind for event in chain.take_events()] == [DrafterEventKind.FAILED] * 3
    assert first.forgotten == ["a"] * 3
    first.error, now = "", 210.0
    assert drafter_of(chain, live()) == "first"
    assert chain.failures == {}
    assert chain.take_events() == (DrafterEvent("first", DrafterEventKind.RECOVERED),)
    assert chain.take_events() == ()


def test_a_pause_has_an_end_and_a_success_makes_it_short_again() -> None:
    back_off = FailureBackOff()
    now = 0.0
    for _ in range(20):
        back_off.fail(now)
        now += 10_000
    assert back_off.pause_seconds == 3600
    assert back_off.succeed()
    assert not back_off.succeed()
    back_off.fail(now)
    assert not back_off.allows(now + 29)
    assert back_off.allows(now + 30)


def test_a_request_goes_on_with_the_next_drafter_and_probes_the_first_ever_more_rarely() -> None:
    chain = DrafterChain([Always("first"), Always("second")])
    row, used = live(), []
    for _ in range(60):
        used.append(drafter_of(chain, row))
        chain.observe(row, used[-1], 1, int(used[-1] == "second"))
    assert used[:4] == ["first"] * 4
    probes = [n for n, name in enumerate(used) if name == "first" and n >= 4]
    assert probes == [12, 29]  # after 8 and 16 rounds; the next pause is of 32
    fell_short = DrafterEvent("first", DrafterEventKind.FELL_SHORT, "a")
    assert chain.take_events() == (fell_short,) * 3


def test_a_probe_that_is_accepted_brings_the_drafter_back() -> None:
    chain = DrafterChain([Always("first"), Always("second")])
    row = live()
    for _ in range(12):
        chain.observe(row, drafter_of(chain, row), 1, 0)
    assert drafter_of(chain, row) == "first"
    chain.observe(row, "first", 1, 1)
    assert [drafter_of(chain, row) for _ in range(20)] == ["first"] * 20


def test_one_requests_misses_are_not_anothers() -> None:
    chain = DrafterChain([Always("first"), Always("second")])
    for _ in range(4):
        chain.observe(live("a"), "first", 3, 0)
    assert [drafter_of(chain, live(name)) for name in "ab"] == ["second", "first"]
    chain.forget("a")
    assert drafter_of(chain, live("a")) == "first"


def test_the_last_of_the_list_and_the_one_a_request_names_are_never_left_out_for_misses() -> None:
    chain = DrafterChain([Always("first"), Always("second")])
    named, alone = live("named", drafter="first"), live("alone")
    for _ in range(30):
        chain.observe(named, drafter_of(chain, named), 2, 0)
        chain.observe(alone, "second", 2, 0)
    assert drafter_of(chain, named) == "first"
    assert chain.take_events() == ()
    single = DrafterChain([Always("only")])
    for _ in range(30):
        single.observe(alone, drafter_of(single, alone), 2, 0)
    assert drafter_of(single, alone) == "only"


def test_a_miss_counts_only_in_a_row() -> None:
    misses = MissBackOff()
    assert not any(misses.observe(accepted) for accepted in (0, 0, 0, 1) * 10)


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_the_service_hears_of_a_failing_drafter_and_no_request_fails(how: str) -> None:
    engine = tiny_engine(drafters=("draft_model", "prompt_lookup"), max_num_rows=4)
    runner = engine._drafters._drafters[0].runner  # type: ignore[attr-defined]
    forward = runner.forward

    def failing(rows):  # type: ignore[no-untyped-def]
        if how == "raises":
            raise MemoryError("planted")
        return torch.full_like(forward(rows), float("nan"))

    runner.forward = failing
    outcome = run(engine, [request(str(n), p, max_tokens=30) for n, p in enumerate(prompts(8))])
    assert [outcome.token_ids[str(n)] for n in range(8)] == generated(8, 30)
    events = [event for step in outcome.steps for event in step.drafter_events]
    failed = [event for event in events if event.kind is DrafterEventKind.FAILED]
    assert [event.drafter for event in failed] == ["draft_model"]
    assert ("planted" if how == "raises" else "not finite") in failed[0].reason
    assert any(s.drafter == "prompt_lookup" for s in outcome.stats.values())


def test_a_hopeless_drafter_gives_way_to_the_next_and_no_token_changes() -> None:
    engine = tiny_engine(drafters=("draft_model", "prompt_lookup"), max_num_rows=4)
    model = engine._drafters._drafters[0].runner.model  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-3)
    looping = [5, 6, 7, 8] * 8
    items = [request(str(n), [n + 3, *looping], max_tokens=40, ignore_eos=True) for n in range(4)]
    outcome = run(engine, items)
    plain = run(tiny_engine(), [request(i.request_id, i.prompt_token_ids, max_tokens=40,
                                        ignore_eos=True, mode="off") for i in items])  # fmt: skip
    assert outcome.token_ids == plain.token_ids
    events = [event for step in outcome.steps for event in step.drafter_events]
    assert {event.kind for event in events} == {DrafterEventKind.FELL_SHORT}
    assert {event.request_id for event in events} == {"0", "1", "2", "3"}
    assert sum(s.num_accepted_tokens for s in outcome.stats.values()) > 0
