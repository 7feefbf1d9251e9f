"""Drift of acceptance: told once when it lasts, not for noise, quiet hours or a short dip."""

import logging
import random

import pytest

from telemetry.drift import AcceptanceDrift

_HOUR = 3600.0


def _drive(
    drift: AcceptanceDrift, hours: float, acceptance: float, start: float, seed: int = 0
) -> float:
    """A request of twenty steps every ten seconds; the last drop."""
    rng, drop = random.Random(seed), 0.0
    for index in range(int(hours * 360)):
        accepted = sum(rng.random() < acceptance for _ in range(20))
        drop = drift.observe("head", accepted, 20, start + index * 10)
    return drop


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_lasting_fall_is_told_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    drift = AcceptanceDrift()
    assert _drive(drift, 12, 0.6, 0.0) < 0.03
    assert _told(caplog) == []
    drop = _drive(drift, 3, 0.4, 12 * _HOUR)
    assert 0.05 < drop < 0.15
    (line,) = _told(caplog)
    assert "drafter head" in line
    assert "tandem train run" in line
    _drive(drift, 2, 0.4, 15 * _HOUR)
    assert len(_told(caplog)) == 1


def test_noise_and_a_dip_shorter_than_the_patience_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drift = AcceptanceDrift()
    _drive(drift, 12, 0.6, 0.0)
    _drive(drift, 0.8, 0.4, 12 * _HOUR)
    _drive(drift, 6, 0.6, 12.8 * _HOUR)
    assert _told(caplog) == []


def test_it_is_told_again_after_a_recovery(caplog: pytest.LogCaptureFixture) -> None:
    drift = AcceptanceDrift(usual_seconds=10 * 86_400)
    _drive(drift, 24, 0.6, 0.0)
    _drive(drift, 3, 0.4, 24 * _HOUR)
    assert _drive(drift, 24, 0.6, 27 * _HOUR) < 0.025
    _drive(drift, 3, 0.4, 51 * _HOUR)
    assert len(_told(caplog)) == 2


def test_a_rise_is_no_drop_and_little_traffic_says_nothing() -> None:
    drift = AcceptanceDrift()
    _drive(drift, 12, 0.4, 0.0)
    assert _drive(drift, 3, 0.6, 12 * _HOUR) == 0.0
    seldom = AcceptanceDrift()
    _drive(seldom, 12, 0.6, 0.0)
    assert seldom.observe("head", 0, 20, 60 * _HOUR) == 0.0


def test_drafters_are_kept_apart() -> None:
    drift = AcceptanceDrift()
    _drive(drift, 12, 0.6, 0.0)
    assert drift.observe("other", 0, 20, 12 * _HOUR) == 0.0
