"""The breaker of speculation reaches the records as it changes, between steps and when idle."""

import time

from engine.breaker import SpeculationBreaker
from tests.fakes import FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import read_all, text_request


async def test_every_change_of_the_breaker_is_recorded_once() -> None:
    engine = FakeEngine()
    engine.breaker = SpeculationBreaker(cooldown_seconds=0.2, num_trials=1)
    async with running_server(engine) as running:
        await read_all(running, text_request())
        assert running.recording.breaker_states == []
        engine.breaker.observe(True, time.monotonic())
        await read_all(running, text_request())
        await read_all(running, text_request())
        assert running.recording.breaker_states == ["open"]
        time.sleep(0.25)
        await read_all(running, text_request())
        engine.breaker.observe(False, time.monotonic())
        await read_all(running, text_request())
        assert running.recording.breaker_states == ["open", "half_open", "closed"]
