"""The events of a call gathered into one answer."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from engine.request import TokenLogprob
from service.convert.responses import write_choice, write_logprobs, write_started, write_usage
from service.orders import Delta, Event, Finished, Started
from service.pb import generation_pb2 as pb


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


async def collect(events: AsyncIterator[Event]) -> pb.GenerateUnaryResponse:
    """The answer of GenerateUnary. Raises what the events raise."""
    gathered: dict[int, _Gathered] = {}
    response = pb.GenerateUnaryResponse()
    async for event in events:
        match event:
            case Started():
                response.started.CopyFrom(write_started(event))
            case Delta():
                response.prompt_logprobs.extend(write_logprobs(event.prompt_logprobs))
                part = gathered.setdefault(event.choice_index, _Gathered())
                part.texts.append(event.text)
                part.token_ids.extend(event.token_ids)
                part.logprobs.extend(event.logprobs)
            case Finished():
                response.usage.CopyFrom(write_usage(event))
                for choice in event.choices:
                    part = gathered.get(choice.choice_index, _Gathered())
                    response.completions.add(
                        text="".join(part.texts),
                        token_ids=part.token_ids,
                        logprobs=write_logprobs(part.logprobs),
                        result=write_choice(choice),
                    )
    return response
