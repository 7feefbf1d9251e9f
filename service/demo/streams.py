"""Sends prompts as concurrent gRPC streams with the project's own client."""

import asyncio
import time
from collections.abc import Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration

from service.async_client import AsyncClient
from service.client_calls import build_request
from service.demo.answers import Answer, Round
from service.demo.prompts import DemoPrompt
from service.pb import generation_pb2 as pb


class Watcher(Protocol):
    """Is told what streams bring, by the index of the prompt."""

    def delta(self, index: int, text: str, num_tokens: int) -> None: ...

    def finished(self, index: int) -> None: ...


async def send_all(
    address: str,
    prompts: Sequence[DemoPrompt],
    num_streams: int,
    speculation: bool | None,
    watcher: Watcher,
) -> Round:
    """Send every prompt greedily, num_streams at a time, each as a call of its own.

    speculation: None leaves it to the server, False switches it off. Raises TandemError when
    a stream ends with anything but OK; the others are cancelled then.
    """
    waiting = iter(enumerate(prompts))  # shared: a stream takes the next prompt when it is free
    answers: dict[int, Answer] = {}

    async def work(client: AsyncClient) -> None:
        for index, prompt in waiting:
            answers[index] = await _send(client, index, prompt, speculation, watcher)
            watcher.finished(index)

    async with AsyncClient(address) as client:
        started_at = time.monotonic()
        tasks = [asyncio.create_task(work(client)) for _ in range(num_streams)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        wall_seconds = time.monotonic() - started_at
    return Round(tuple(answers[index] for index in range(len(prompts))), wall_seconds)


async def _send(
    client: AsyncClient,
    index: int,
    prompt: DemoPrompt,
    speculation: bool | None,
    watcher: Watcher,
) -> Answer:
    request = build_request(
        [{"role": "user", "content": prompt.prompt}],
        max_tokens=prompt.max_tokens,
        temperature=0,
        speculation=speculation,
        labels={"kind": prompt.kind},
    )
    request.output.prompt_token_ids = True
    stream = client.generate(request)
    prompt_token_ids: tuple[int, ...] = ()
    async for event in stream.events():
        if event.WhichOneof("event") == "started":
            prompt_token_ids = tuple(event.started.prompt_token_ids)
        elif event.WhichOneof("event") == "delta":
            watcher.delta(index, event.delta.text, len(event.delta.token_ids))
    result = await stream.result()
    if result.outcome is None:
        raise RuntimeError(f"{prompt.name}: the stream ended without its statistics")
    return _answer(prompt, prompt_token_ids, result.token_ids, result.outcome)


def _answer(
    prompt: DemoPrompt,
    prompt_token_ids: tuple[int, ...],
    token_ids: Sequence[int],
    outcome: pb.ChoiceResult,
) -> Answer:
    timing, speculation, cost = outcome.timing, outcome.speculation, outcome.cost
    return Answer(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        token_ids=tuple(token_ids),
        num_draft_tokens=speculation.num_draft_tokens,
        num_accepted_tokens=speculation.num_accepted_tokens,
        num_verify_steps=speculation.num_verify_steps,
        ttft_seconds=(
            _seconds(timing.time_to_first_token) if timing.HasField("time_to_first_token") else None
        ),
        tpot_seconds=(
            _seconds(timing.time_per_output_token)
            if timing.HasField("time_per_output_token")
            else None
        ),
        cost_nano_usd=cost.nano_usd if cost.HasField("nano_usd") else None,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
