"""Labels for the allocation of cost: from the request, and from the caller's baggage."""

from collections.abc import Mapping
from typing import Any

import grpc
import pytest
from grpc import aio

from engine.request import GenerationRequest
from telemetry.recording import OpenRequest
from tests.fakes import FakeRecording
from tests.service.serving import running_server
from tests.service.test_generate import text_request


class LabelsSeen(FakeRecording):
    """Keeps the labels of every request."""

    seen: "list[dict[str, str]]"

    def begin(
        self, request: GenerationRequest, *, labels: Mapping[str, str], **more: Any
    ) -> OpenRequest:
        self.seen = [*getattr(self, "seen", []), dict(labels)]
        return FakeRecording.begin(self, request, labels=labels, **more)


async def _labels(baggage: str, **labels: str) -> dict[str, str]:
    recording = LabelsSeen()
    async with running_server(recording=recording) as running:
        metadata = (("baggage", baggage),) if baggage else ()
        call = running.stub.Generate(text_request(labels=labels), metadata=metadata)
        async for _ in call:
            pass
    (seen,) = recording.seen
    return seen


async def test_baggage_adds_labels_and_the_request_has_the_last_word() -> None:
    baggage = "tandem.label.team=search,tandem.label.app=web,other=x"
    assert await _labels(baggage, app="mobile") == {"team": "search", "app": "mobile"}
    assert await _labels("", app="mobile") == {"app": "mobile"}
    assert (
        await _labels(
            "",
        )
        == {}
    )


@pytest.mark.parametrize(
    "baggage",
    [
        ",".join(f"tandem.label.k{n}=v" for n in range(17)),
        "tandem.label.team=" + "x" * 65,
    ],
)
async def test_baggage_beyond_the_bounds_of_labels_is_refused_by_name(baggage: str) -> None:
    async with running_server() as running:
        call = running.stub.Generate(text_request(), metadata=(("baggage", baggage),))
        with pytest.raises(aio.AioRpcError) as refused:
            async for _ in call:
                pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.value.details() or "").startswith("labels")
