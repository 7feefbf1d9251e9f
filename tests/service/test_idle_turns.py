"""Between two slices of an audit the engine's thread looks for requests."""

import time

from tests.fakes import FakeEngine
from tests.service.serving import running_server
from tests.service.test_generate import read_all, text_request


class EndlesslyAuditing(FakeEngine):
    """Its audit never comes to an end."""

    num_slices = 0
    num_beside_work = 0

    def audit_slice(self) -> tuple[()]:  # type: ignore[override]
        time.sleep(0.001)
        self.num_slices += 1
        self.num_beside_work += self.has_work()
        return ()


async def test_a_request_that_arrives_in_the_middle_of_an_audit_is_served_next() -> None:
    engine = EndlesslyAuditing()
    async with running_server(engine) as running:
        for _ in range(2):
            await read_all(running, text_request())
    assert engine.num_slices
    assert not engine.num_beside_work
