"""The client for threads; service.async_client is the one for asyncio.

    with Client("127.0.0.1:50051") as client:
        for text in client.generate("Once upon a time", max_tokens=64):
            print(text, end="", flush=True)

A stream iterates text; `.events()` iterates the messages of the contract, `.result()` reads to
the end. TandemError is raised for a status other than OK.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Any, Self

import grpc

from service.attempts import Attempts, GenerationResult, RetryPolicy
from service.client_calls import (
    CHANNEL_OPTIONS,
    NO_CREDENTIALS,
    Credentials,
    Prompt,
    TandemError,
    as_request,
    fits_before,
    read_call_error,
    remaining_seconds,
)
from service.pb import generation_pb2 as pb
from service.pb import generation_pb2_grpc as pb_grpc

__all__ = ["Client", "Credentials", "GenerationResult", "GenerationStream", "TandemError"]


class GenerationStream:
    """One generation. Leave it early with `cancel()`; the server frees the row within a step."""

    def __init__(
        self,
        stub: pb_grpc.GenerationServiceStub,
        request: pb.GenerateRequest,
        policy: RetryPolicy,
        credentials: Credentials,
        timeout_seconds: float | None,
    ) -> None:
        self._stub = stub
        self._attempts = Attempts(request, policy)
        self._credentials = credentials
        self._deadline_at = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._call: Any = None
        self._is_cancelled = False
        self._events = self._run()

    def __iter__(self) -> Iterator[str]:
        """The text of the first completion, as it comes."""
        for event in self._events:
            if event.delta.text and event.delta.choice_index == 0:
                yield event.delta.text

    def events(self) -> Iterator[pb.GenerateResponse]:
        return self._events

    def result(self) -> GenerationResult:
        """Read what is left and return the whole."""
        for _ in self._events:
            pass
        return self._attempts.result

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()

    def _run(self) -> Generator[pb.GenerateResponse]:
        while not self._attempts.is_complete():
            self._call = self._stub.Generate(
                self._attempts.next_request(),
                timeout=remaining_seconds(self._deadline_at),
                metadata=self._credentials.metadata(),
            )
            try:
                with closing(_Cancelling(self._call)):
                    for response in self._call:
                        seen = self._attempts.take(response)
                        if seen is not None:
                            yield seen
            except grpc.RpcError as error:
                if self._attempts.is_complete():
                    return
                failure = read_call_error(error)
                wait = None if self._is_cancelled else self._attempts.wait_before_retry(failure)
                if wait is None or not fits_before(wait, self._deadline_at):
                    raise failure from error
                time.sleep(wait)


class _Cancelling:
    """Ends a call when its reader goes away."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def close(self) -> None:
        self._call.cancel()


class Client:
    """A connection for threads. Closing it ends its streams."""

    def __init__(
        self,
        address: str,
        *,
        credentials: Credentials = NO_CREDENTIALS,
        retry: RetryPolicy | None = None,
    ) -> None:
        secure = credentials.channel_credentials()
        self._channel = (
            grpc.insecure_channel(address, CHANNEL_OPTIONS)
            if secure is None
            else grpc.secure_channel(address, secure, CHANNEL_OPTIONS)
        )
        self.stub = pb_grpc.GenerationServiceStub(self._channel)
        self._credentials = credentials
        self._retry = retry or RetryPolicy()

    def generate(
        self,
        prompt: Prompt | pb.GenerateRequest,
        *,
        timeout_seconds: float | None = None,
        **options: Any,
    ) -> GenerationStream:
        """Begin a generation; options are those of `build_request`."""
        request = as_request(prompt, options)
        return GenerationStream(self.stub, request, self._retry, self._credentials, timeout_seconds)

    def tokenize(self, text: str, *, model: str = "") -> tuple[int, ...]:
        request = pb.TokenizeRequest(model=model, text=text)
        return tuple(self._call(self.stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: tuple[int, ...], *, model: str = "") -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        return str(self._call(self.stub.Detokenize, request).text)

    def model(self, name: str = "") -> pb.GetModelResponse:
        response: pb.GetModelResponse = self._call(
            self.stub.GetModel, pb.GetModelRequest(model=name)
        )
        return response

    def load(self) -> pb.GetLoadResponse:
        response: pb.GetLoadResponse = self._call(self.stub.GetLoad, pb.GetLoadRequest())
        return response

    def is_reachable(self, timeout_seconds: float) -> bool:
        """Whether something listens at the address."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout_seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def wait_until_ready(self, timeout_seconds: float) -> pb.GetModelResponse:
        """The model, once the server serves it. Raises TandemError when it does not in time."""
        deadline_at = time.monotonic() + timeout_seconds
        while True:
            try:
                return self.model()
            except TandemError as error:
                is_late = time.monotonic() >= deadline_at
                if error.code is not grpc.StatusCode.UNAVAILABLE or is_late:
                    raise
            time.sleep(0.2)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, metadata=self._credentials.metadata(), timeout=60)
        except grpc.RpcError as error:
            raise read_call_error(error) from error

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
