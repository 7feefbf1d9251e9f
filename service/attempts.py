"""One generation over as many attempts as it takes: what to send, and when to try again."""

import random
from dataclasses import dataclass, field

import grpc

from service.client_calls import TandemError
from service.pb import generation_pb2 as pb

_RETRIABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_RESUMABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Waits double from initial to max, each shortened at random by up to half.

    max_attempts counts the first one. A wait that the server asks for (RetryInfo) is kept to
    when it is longer.
    """

    max_attempts: int = 4
    initial_seconds: float = 0.1
    max_seconds: float = 5.0

    def wait_seconds(self, num_failures: int, asked_seconds: float) -> float:
        planned = min(self.max_seconds, self.initial_seconds * 2.0 ** (num_failures - 1))
        jitter = random.uniform(0.5, 1.0)  # noqa: S311 - no secret
        return max(asked_seconds, planned * jitter)


@dataclass(slots=True)
class GenerationResult:
    """A completion, complete once `finish_reason` is set.

    outcome holds timing, speculation and cost; usage the token counts. Both are None when the
    stream broke between the last token and the end.
    """

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    seed: int = 0
    finish_reason: str = ""
    outcome: pb.ChoiceResult | None = None
    usage: pb.Usage | None = None


class Attempts:
    """One generation over as many attempts as it takes.

    While nothing was received, a refused attempt is repeated. After that a broken stream is
    resumed with its seed and tokens where the request allows it, and the reader sees one
    stream: one `started`, every token once, and the text as if nothing had happened.
    """

    def __init__(self, request: pb.GenerateRequest, policy: RetryPolicy) -> None:
        self.result = GenerationResult()
        self._original = request
        self._policy = policy
        self._num_failures = 0
        self._started: pb.Started | None = None

    def is_complete(self) -> bool:
        return bool(self.result.finish_reason)

    def next_request(self) -> pb.GenerateRequest:
        """What to send now."""
        if self._started is None:
            return self._original
        request = pb.GenerateRequest()
        request.CopyFrom(self._original)
        request.request_id = f"{self._started.request_id}.{self._num_failures}"
        request.sampling.seed = self._started.seed
        request.resume_token_ids.extend(
            self.result.token_ids[len(self._original.resume_token_ids) :]
        )
        return request

    def take(self, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        """Note an event; what the reader should see of it."""
        match response.WhichOneof("event"):
            case "started":
                return self._take_started(response)
            case "delta" if response.delta.choice_index == 0:
                self._num_failures = 0
                self.result.text += response.delta.text
                self.result.token_ids.extend(response.delta.token_ids)
                if response.delta.finish_reason:
                    self.result.finish_reason = _reason_name(response.delta.finish_reason)
            case "finished":
                self.result.outcome = response.finished.choices[0]
                self.result.usage = response.finished.usage
                self.result.finish_reason = _reason_name(self.result.outcome.finish_reason)
        return response

    def _take_started(self, response: pb.GenerateResponse) -> pb.GenerateResponse | None:
        started = response.started
        is_first = self._started is None
        if is_first:
            self._started = started
            self.result.request_id = started.request_id
            self.result.seed = started.seed
            self.result.token_ids.extend(self._original.resume_token_ids)
            self.result.text = started.resumed_text
            return response
        missing = started.resumed_text[len(self.result.text) :]
        if not missing:
            return None
        self.result.text += missing
        return pb.GenerateResponse(
            delta=pb.Delta(first_token_index=len(self.result.token_ids), text=missing)
        )

    def wait_before_retry(self, error: TandemError) -> float | None:
        """Seconds to wait before the next attempt; None: give up and raise the error."""
        self._num_failures += 1
        if self._num_failures >= self._policy.max_attempts:
            return None
        if self._started is None:
            can_go_on = error.code in _RETRIABLE and not (
                error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                and error.retry_after_seconds is None
            )
        else:
            can_go_on = error.code in _RESUMABLE and self._is_resumable()
        if not can_go_on:
            return None
        return self._policy.wait_seconds(self._num_failures, error.retry_after_seconds or 0.0)

    def _is_resumable(self) -> bool:
        request = self._original
        sampling = request.sampling
        is_repeatable = (
            sampling.HasField("temperature") and sampling.temperature == 0
        ) or sampling.acceptance_rule != pb.ACCEPTANCE_RULE_REJECTION
        return (
            is_repeatable
            and (request.n or 1) == 1
            and not request.stopping.stop_strings
            and not request.HasField("structured_output")
            and not request.output.prompt_logprobs
            and not sampling.presence_penalty
            and not sampling.frequency_penalty
            and not request.output.HasField("top_logprobs")
        )


def _reason_name(reason: pb.FinishReason.ValueType) -> str:
    """FINISH_REASON_STOP_TOKEN is "stop_token"."""
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
