"""Audits happen while nobody waits, in slices that an arriving request waits for one of."""

from collections.abc import Sequence

import pytest
import torch

from engine.audit import SLICE_TOKENS, AuditVerdict
from engine.config import AuditConfig
from engine.engine import Engine
from engine.reading import FreshReading, OwnReading
from tests.engine.driver import Outcome, request, run, tiny_engine

PROMPT = [3 + n % 90 for n in range(150)]


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of every forward of an audit."""
    found: list[int] = []
    for kind in (OwnReading, FreshReading):
        read = kind.read

        def counted(  # type: ignore[no-untyped-def]
            self, token_ids: Sequence[int], num_logits: int, read=read
        ) -> torch.Tensor:
            found.append(len(token_ids))
            return read(self, token_ids, num_logits)

        monkeypatch.setattr(kind, "read", counted)
    return found


def audited(layout: str = "ragged") -> Engine:
    """With one long request waiting for its audit."""
    engine = tiny_engine(
        layout=layout, audit=AuditConfig(share=1.0), max_model_tokens=256, max_num_rows=2
    )
    run(engine, [request("long", PROMPT, max_tokens=70, ignore_eos=True)])
    return engine


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["ragged", "aligned"])
def test_a_long_audit_is_made_of_short_forwards(layout: str, widths: list[int]) -> None:
    engine = audited(layout)
    _ = engine._parts.auditor.epsilon
    widths.clear()
    num_slices = 0
    while not (found := engine.audit_slice()):
        assert found is not None
        num_slices += 1
        assert len(widths) <= num_slices, "more than one forward in a slice"
    assert found[0].verdict is AuditVerdict.EXACT
    assert max(widths) <= SLICE_TOKENS
    assert sum(widths) == 150 + 70 - 1


@pytest.mark.thorough
def test_a_target_without_a_cache_of_its_own_is_read_as_a_whole(
    widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = audited()
    read = OwnReading.read

    def refusing(self: OwnReading, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
        if self._past is not None and self._num_read:
            raise TypeError("planted: this model keeps no cache")
        return read(self, token_ids, num_logits)

    monkeypatch.setattr(OwnReading, "read", refusing)
    finding = engine.audit_next()
    assert finding is not None
    assert finding.verdict is AuditVerdict.EXACT
    assert widths[-1] == 150 + 70 - 1


@pytest.mark.thorough
def test_no_audit_runs_while_requests_wait_or_run_and_an_arriving_one_is_served_next(
    widths: list[int],
) -> None:
    engine = audited()
    alone = run(tiny_engine(max_model_tokens=256), [request("next", [5, 6, 7])])
    for _ in range(12):  # in the middle: calibration is over and the text has begun
        assert engine.audit_slice() == ()
    num_begun = len(widths)
    outcome = Outcome()
    engine.submit(request("next", [5, 6, 7]))
    while engine.has_work():
        assert engine.audit_slice() is None, "an audit beside a request that waits or runs"
        outcome.add_step(engine)
    assert len(widths) == num_begun, "a step computed for an audit"
    assert outcome.token_ids["next"] == alone.token_ids["next"]
    verdicts = {finding.request_id: finding.verdict for finding in iter(engine.audit_next, None)}
    assert verdicts == {"long": AuditVerdict.EXACT, "next": AuditVerdict.EXACT}
    assert max(widths) <= 2 * SLICE_TOKENS
