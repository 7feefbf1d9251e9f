"""What the clients for threads and for asyncio share: requests, credentials, errors."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from service.pb import generation_pb2 as pb
from telemetry.tracing import inject_context

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.enable_retries", 0),  # the client knows better what may be repeated
)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Credentials:
    """How to reach a server that asks for more than an address.

    token goes out as `authorization: Bearer`. root_certificates (PEM; b"" takes those of the
    system) turns TLS on; certificate and key are the client's own, for mTLS.
    """

    token: str = ""
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self.root_certificates is None:
            return None
        return grpc.ssl_channel_credentials(
            self.root_certificates or None, self.key, self.certificate
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Authorization and the trace context of the caller."""
        entries = dict(inject_context())
        if self.token:
            entries["authorization"] = f"Bearer {self.token}"
        return tuple(entries.items())


NO_CREDENTIALS = Credentials()


class TandemError(Exception):
    """A call that ended with a status other than OK.

    field_violations: (path, reason) of the values that were refused. retry_after_seconds: what
    the server asks for, or None.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        field_violations: tuple[tuple[str, str], ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field_violations = field_violations
        self.retry_after_seconds = retry_after_seconds


def read_error(
    code: grpc.StatusCode, message: str | None, trailers: Sequence[tuple[str, str | bytes]]
) -> TandemError:
    """The error with what its google.rpc details say."""
    violations: list[tuple[str, str]] = []
    retry_after: float | None = None
    for key, value in trailers:
        if key != "grpc-status-details-bin" or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest.FromString(detail.value)
                violations += [(v.field, v.description) for v in bad.field_violations]
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = delay.seconds + delay.nanos / 1e9
    return TandemError(code, message or "", tuple(violations), retry_after)


def read_call_error(error: Any) -> TandemError:
    """The error of a call that ended, of either client's kind."""
    return read_error(error.code(), error.details(), tuple(error.trailing_metadata() or ()))


def build_request(
    prompt: Prompt,
    *,
    model: str = "",
    request_id: str = "",
    max_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    num_completions: int | None = None,
    speculation: bool | None = None,
    drafter: str = "",
    drafters: Sequence[str] = (),
    max_draft_tokens: int | None = None,
    labels: Mapping[str, str] | None = None,
    priority: int | None = None,
) -> pb.GenerateRequest:
    """A request for a text, token ids, or messages ({"role": ..., "content": ...}).

    Left out: the server's defaults. speculation: True on, False off, None the server's choice.
    drafter: the only one that may draft; drafters: those that may, first choice first.
    For everything else there is, change the message that is returned.
    """
    request = pb.GenerateRequest(
        model=model, request_id=request_id, n=num_completions, priority=priority
    )
    _set_prompt(request, prompt)
    request.sampling.MergeFrom(
        pb.SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    )
    request.stopping.MergeFrom(
        pb.StoppingParams(max_tokens=max_tokens, stop_strings=stop, ignore_eos=ignore_eos)
    )
    mode = pb.SpeculationOptions.MODE_UNSPECIFIED
    if speculation is not None:
        mode = pb.SpeculationOptions.MODE_ON if speculation else pb.SpeculationOptions.MODE_OFF
    request.speculation.MergeFrom(
        pb.SpeculationOptions(
            mode=mode, drafter=drafter, drafters=drafters, max_draft_tokens=max_draft_tokens
        )
    )
    request.labels.update(labels or {})
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    request.tokens.SetInParent()
    for part in prompt:
        if isinstance(part, int):
            request.tokens.ids.append(part)
        else:
            role = pb.Role.Value(f"ROLE_{part['role'].upper()}")
            request.chat.messages.add(role=role, content=part["content"])


def as_request(prompt: Prompt | pb.GenerateRequest, options: dict[str, Any]) -> pb.GenerateRequest:
    if not isinstance(prompt, pb.GenerateRequest):
        return build_request(prompt, **options)
    if options:
        raise TypeError("options go into the GenerateRequest that is given")
    return prompt


def remaining_seconds(deadline_at: float | None) -> float | None:
    return None if deadline_at is None else max(0.001, deadline_at - time.monotonic())


def fits_before(wait_seconds: float, deadline_at: float | None) -> bool:
    return deadline_at is None or time.monotonic() + wait_seconds < deadline_at
