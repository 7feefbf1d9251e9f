"""Failures as gRPC statuses with google.rpc details: one constructor per row of the status table.

The table is in the comments of protos/tandem/v1/generation.proto.
"""

import math
from collections.abc import Sequence

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine.request import RequestError

ERROR_DOMAIN = "tandem"


class ServiceError(Exception):
    """A call that ends with a status other than OK.

    code, message and details are what the client sees, so they hold no prompt, no output and
    no stack trace.
    """

    def __init__(
        self, code: grpc.StatusCode, message: str, details: Sequence[Message] = ()
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = tuple(details)

    def to_status(self) -> grpc.Status:
        """The status with its details in `grpc-status-details-bin`."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return rpc_status.to_status(status)


def _reason(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata)


def _retry_after(seconds: float) -> error_details_pb2.RetryInfo:
    nanoseconds = math.ceil(max(seconds, 0.0) * 1e9)
    return error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)
    )


def invalid_argument(field_path: str, reason: str) -> ServiceError:
    """A value that cannot be served."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field_path, description=reason)
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field_path}: {reason}",
        (error_details_pb2.BadRequest(field_violations=[violation]),),
    )


def unimplemented(field_path: str, reason: str) -> ServiceError:
    """A field of the contract that this server cannot serve."""
    return ServiceError(
        grpc.StatusCode.UNIMPLEMENTED,
        f"{field_path}: {reason}",
        (_reason("FEATURE_NOT_SUPPORTED", field=field_path),),
    )


def model_not_found(model: str, loaded: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        f"model: {model!r} is not loaded; this server has {loaded!r}",
        (_reason("MODEL_NOT_FOUND", loaded=loaded),),
    )


def already_live(request_id: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.ALREADY_EXISTS,
        f"request_id: a live request has the id {request_id!r}",
        (_reason("REQUEST_ID_LIVE"),),
    )


def speculation_impossible(reason: str) -> ServiceError:
    violation = error_details_pb2.PreconditionFailure.Violation(
        type="SPECULATION", subject="speculation", description=reason
    )
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"speculation: {reason}",
        (error_details_pb2.PreconditionFailure(violations=[violation]),),
    )


def exhausted(subject: str, reason: str, retry_after_seconds: float) -> ServiceError:
    """A bound of the server (subject "server") or of a tenant has been reached."""
    violation = error_details_pb2.QuotaFailure.Violation(subject=subject, description=reason)
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"{subject}: {reason}",
        (
            error_details_pb2.QuotaFailure(violations=[violation]),
            _retry_after(retry_after_seconds),
        ),
    )


def client_too_slow(num_messages: int) -> ServiceError:
    """Retrying does not help a client that does not read: there is no RetryInfo."""
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the client left more than {num_messages} messages unread",
        (_reason("CLIENT_TOO_SLOW"),),
    )


def unavailable(reason: str, retry_after_seconds: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        reason,
        (_reason("NOT_SERVING"), _retry_after(retry_after_seconds)),
    )


def deadline_exceeded(reason: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, reason, (_reason("DEADLINE"),))


def cancelled(reason: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.CANCELLED, reason)


def unauthenticated(reason: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAUTHENTICATED, reason, (_reason("CREDENTIALS_REQUIRED"),))


def permission_denied(reason: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, reason, (_reason("NOT_ALLOWED"),))


def engine_lost(reason: str) -> ServiceError:
    """The engine stopped in mid-stream: the request can be started again."""
    return ServiceError(grpc.StatusCode.ABORTED, reason, (_reason("ENGINE_LOST"),))


def internal(reason: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.INTERNAL, reason, (_reason("ENGINE_ERROR"),))


def unrecorded(reason: str) -> ServiceError:
    """The output was sent, but there is no row to account for it."""
    return ServiceError(grpc.StatusCode.INTERNAL, reason, (_reason("LEDGER_WRITE_FAILED"),))


def as_service_error(error: Exception) -> ServiceError:
    """What a client is told about any exception; unknown ones give nothing away."""
    if isinstance(error, ServiceError):
        return error
    if isinstance(error, RequestError):
        return invalid_argument(error.field, error.reason)
    return internal("internal error")
