"""A head's confidence becomes an estimate of acceptance, and that decides how far it drafts."""

import random
from pathlib import Path

import pytest

from engine.drafter.head.calibration import Calibration, fit_calibration
from engine.training.evaluation import expected_calibration_error
from tests.engine.driver import request, run, tiny_engine
from tests.engine.head.heads import deep_tiny_llama, save_tiny_head, tiny_head
from tests.engine.head.test_head_drafter import listen


def _boastful(seed: int, count: int = 4000) -> list[tuple[float, bool]]:
    """Drafts accepted with the square of the confidence in them."""
    generator = random.Random(seed)
    sure = [generator.random() for _ in range(count)]
    return [(c, generator.random() < c * c) for c in sure]


def test_a_fit_makes_confidence_honest_on_drafts_it_never_saw() -> None:
    fitted = fit_calibration(_boastful(1))
    fresh = _boastful(2)
    before = expected_calibration_error(fresh)
    after = expected_calibration_error([(fitted.acceptance_of(c), hit) for c, hit in fresh])
    assert before > 0.12
    assert after < 0.03
    assert fitted.acceptance_of(0.5) == pytest.approx(0.25, abs=0.05)


def test_bins_that_contradict_the_order_are_pooled() -> None:
    against = [(i / 400, i < 200) for i in range(400)]  # the surer, the less accepted
    fitted = fit_calibration(against)
    assert len(set(fitted.acceptance)) == 1
    assert fitted.acceptance_of(0.9) == pytest.approx(0.5)
    assert fit_calibration(against[:8]) == Calibration(), "too few to tell anything"


def test_estimates_are_linear_between_points_and_constant_beyond() -> None:
    known = Calibration((0.2, 0.6), (0.1, 0.5))
    assert [known.acceptance_of(c) for c in (0.0, 0.2, 0.4, 0.6, 1.0)] == pytest.approx(
        [0.1, 0.1, 0.3, 0.5, 0.5]
    )
    with pytest.raises(ValueError, match=r"calibration\.acceptance"):
        Calibration((0.2, 0.6), (0.5, 0.1))


@pytest.mark.parametrize(("acceptance", "num_drafts"), [(0.95, 3), (0.5, 1), (0.2, 0)])
def test_a_head_stops_before_a_draft_whose_verification_would_not_pay(
    tmp_path: Path, acceptance: float, num_drafts: int
) -> None:
    calibration = {"confidence": [0.0, 1.0], "acceptance": [acceptance, acceptance]}
    folder = save_tiny_head(
        tmp_path / "head", tiny_head(deep_tiny_llama()), calibration=calibration
    )
    engine = tiny_engine(
        target=deep_tiny_llama(), drafters=("head",), head=str(folder), max_draft_tokens=3
    )
    engine._lengths.min_reach = lambda live: 0.3  # type: ignore[method-assign]
    heard = listen(engine)
    run(engine, [request("a", [5, 9, 17, 30, 8], max_tokens=20)])
    # Its last tokens leave less room than three drafts need.
    lengths = [len(proposal.token_ids) for _, _, proposal in heard][:3]
    assert lengths == [num_drafts] * 3 if num_drafts else not lengths


def test_only_requests_that_leave_drafting_to_the_controller_are_judged(tmp_path: Path) -> None:
    folder = save_tiny_head(tmp_path / "head", tiny_head(deep_tiny_llama()))
    engine = tiny_engine(target=deep_tiny_llama(), drafters=("head",), head=str(folder))
    for mode in ("on", "auto"):
        engine.submit(request(mode, [5, 9, 17], mode=mode))
    engine._lengths._min_reach = 0.4
    found = {
        live.request_id: engine._lengths.min_reach(live)
        for live in engine._scheduler.live_requests()
    }
    assert found == {"on": 0.0, "auto": 0.4}
