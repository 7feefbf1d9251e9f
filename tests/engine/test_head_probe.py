"""A configuration that is wrong in one place is found by what the target accepts."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.drafter.head.config import HeadConfig, HeadFormatError
from engine.drafter.head.model import Eagle3Head
from engine.drafter.head.probe_head import ProbeReport, ProbeText, draft_everywhere, probe, restated
from engine.loader import LoadedModel
from engine.training.unrolled import unroll
from tests.engine.heads import batch_of, config_for, texts, tiny_target, trained_head

_TEXTS = [ProbeText(token_ids, 1) for token_ids in texts()]


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def config(target: LoadedModel) -> HeadConfig:
    """Flags and a base that are far from the defaults, so that each of them matters."""
    return replace(
        config_for(target), norm_before_residual=False, norm_output=False, rope_theta=37.0
    )


@pytest.fixture(scope="module")
def head(target: LoadedModel, config: HeadConfig) -> Eagle3Head:
    return trained_head(target, config)


def _probe(head: Eagle3Head, target: LoadedModel, **planted: Any) -> ProbeReport:
    return probe(restated(head, **planted), target, _TEXTS)


def test_a_head_that_is_right_is_left_alone(head: Eagle3Head, target: LoadedModel) -> None:
    report = _probe(head, target)
    assert report.best.changes == {}
    assert report.best.acceptance_length > 3
    assert len(report.measured) >= 5


@pytest.mark.parametrize("shift", [-1, 1])
def test_layer_ids_off_by_one_are_found(
    head: Eagle3Head, target: LoadedModel, config: HeadConfig, shift: int
) -> None:
    planted = tuple(layer + shift for layer in config.captured_layers)
    report = _probe(head, target, captured_layers=planted)
    assert report.best.changes == {"captured_layers": config.captured_layers}
    assert report.best.acceptance_length > report.measured[0].acceptance_length + 0.5


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_a_norm_flag_the_wrong_way_round_is_found(
    head: Eagle3Head, target: LoadedModel, config: HeadConfig, flag: str
) -> None:
    right = getattr(config, flag)
    report = _probe(head, target, **{flag: not right})
    assert report.best.changes == {flag: right}


def test_another_rotary_base_is_found(target: LoadedModel, config: HeadConfig) -> None:
    """Trained at the common default, though the configuration says something else."""
    trained = trained_head(target, replace(config, rope_theta=10000.0))
    report = _probe(trained, target, rope_theta=3.0)
    assert report.best.changes == {"rope_theta": 10000.0}


def test_two_errors_are_found_together(
    head: Eagle3Head, target: LoadedModel, config: HeadConfig
) -> None:
    planted = tuple(layer + 1 for layer in config.captured_layers)
    report = _probe(head, target, captured_layers=planted, norm_output=True)
    assert report.best.changes == {
        "captured_layers": config.captured_layers,
        "norm_output": False,
    }


def test_the_probe_drafts_what_training_unrolls(
    head: Eagle3Head, target: LoadedModel, config: HeadConfig
) -> None:
    """Two implementations of the same pass, one for batches with anchors and one without."""
    row = texts()[0]
    batch = batch_of(target, config, [row])
    expected = [head.lm_head(output)[0].argmax(-1) for output in unroll(head, batch, 3)]
    found = draft_everywhere(head, torch.tensor(row[1:]), batch.captured[0, :-1], 3)
    for step in range(3):
        count = len(row) - 1 - step  # later positions are fed past the end
        assert torch.equal(found[step, :count], expected[step][:count])


def test_fields_that_a_head_does_not_have_are_refused(head: Eagle3Head) -> None:
    with pytest.raises(HeadFormatError, match="norm_after_everything"):
        restated(head, norm_after_everything=True)
