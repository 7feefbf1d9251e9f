"""How a server listens: gRPC options and credentials."""

from typing import Any

import grpc
from grpc import aio

from service.settings import ServiceSettings

_MIN_PING_INTERVAL_MILLISECONDS = 10_000


def channel_options(settings: ServiceSettings) -> list[tuple[str, Any]]:
    """Server options.

    A second server on the port fails instead of sharing it. A peer that is frozen or gone is
    noticed after keepalive + its timeout, which needs ping_timeout: its default is a minute.
    A connection that has reached its age takes no new calls, so that clients spread over
    servers that were added; gRPC varies the age by a tenth.
    """
    keepalive = int(settings.keepalive_seconds * 1000)
    timeout = int(settings.keepalive_timeout_seconds * 1000)
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_request_bytes),
        ("grpc.max_metadata_size", settings.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", settings.max_metadata_bytes * 2),
        ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
        ("grpc.keepalive_time_ms", keepalive),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MILLISECONDS),
        ("grpc.http2.max_ping_strikes", 2),
    ]
    if settings.max_connection_age_seconds is not None:
        age, grace = (
            settings.max_connection_age_seconds,
            settings.max_connection_age_grace_seconds,
        )
        options += [
            ("grpc.max_connection_age_ms", int(age * 1000)),
            ("grpc.max_connection_age_grace_ms", int(grace * 1000)),
        ]
    return options


def bind(server: aio.Server, settings: ServiceSettings) -> int:
    """Take the port and return it. Raises OSError when it cannot be had."""
    try:
        if settings.tls_certificate is None or settings.tls_key is None:
            port = server.add_insecure_port(settings.address)
        else:
            port = server.add_secure_port(settings.address, _credentials(settings))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {settings.address}: {error}") from error
    if port == 0:
        raise OSError(f"cannot listen on {settings.address}")
    return port


def _credentials(settings: ServiceSettings) -> grpc.ServerCredentials:
    """TLS, and mTLS with a client CA. Files are read anew for every connection."""
    current = _read_configuration(settings)

    def fetch() -> grpc.ServerCertificateConfiguration:
        return _read_configuration(settings)

    return grpc.dynamic_ssl_server_credentials(
        current, fetch, require_client_authentication=settings.tls_client_ca is not None
    )


def _read_configuration(settings: ServiceSettings) -> grpc.ServerCertificateConfiguration:
    assert settings.tls_key is not None  # noqa: S101 - settings refuse one without the other
    assert settings.tls_certificate is not None  # noqa: S101
    client_ca = settings.tls_client_ca
    return grpc.ssl_server_certificate_configuration(
        [(settings.tls_key.read_bytes(), settings.tls_certificate.read_bytes())],
        root_certificates=None if client_ca is None else client_ca.read_bytes(),
    )
