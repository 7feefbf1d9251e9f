"""Tokens of an issuer whose keys come over HTTPS: fetched once, kept, and seldom asked for."""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
import pytest
import trustme
from cryptography.hazmat.primitives.asymmetric import ec

from service.jwt import JwtSubjects
from service.settings import ServiceSettings

ISSUER = "https://issuer.example"


class Issuer:
    """An HTTPS server with a key set; `is_away` makes it fail, `num_fetches` counts."""

    def __init__(self, authority: trustme.CA) -> None:
        self.keys = {"1": ec.generate_private_key(ec.SECP256R1())}
        self.is_away = False
        self.num_fetches = 0
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.num_fetches += 1
                self.send_response(503 if issuer.is_away else 200)
                self.end_headers()
                if not issuer.is_away:
                    self.wfile.write(json.dumps(issuer.key_set()).encode())

            def log_message(self, *arguments: object) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"https://127.0.0.1:{self.server.server_port}/keys"

    def key_set(self) -> dict[str, Any]:
        to_jwk = jwt.algorithms.ECAlgorithm.to_jwk
        return {
            "keys": [
                {**to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}
                for kid, key in self.keys.items()
            ]
        }

    def token(self, kid: str = "1", signed_by: str = "1") -> str:
        claims = {"iss": ISSUER, "aud": "tandem", "sub": "robot", "exp": int(time.time()) + 60}
        return jwt.encode(claims, self.keys[signed_by], algorithm="ES256", headers={"kid": kid})


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def issuer(authority: trustme.CA) -> Iterator[Issuer]:
    started = Issuer(authority)
    yield started
    started.server.shutdown()
    started.server.server_close()


def _subjects(issuer: Issuer, authority: trustme.CA | None, **options: float) -> JwtSubjects:
    context = ssl.create_default_context()
    if authority is not None:
        authority.configure_trust(context)
    return JwtSubjects(ISSUER, "tandem", issuer.url, ssl_context=context, **options)


async def test_keys_are_fetched_once_however_many_tokens_come(
    issuer: Issuer, authority: trustme.CA
) -> None:
    subjects = _subjects(issuer, authority)
    assert {await subjects.subject_of(issuer.token()) for _ in range(20)} == {"robot"}
    for number in range(20):
        assert await subjects.subject_of(issuer.token(kid=f"made up {number}")) is None
    assert issuer.num_fetches == 1


async def test_a_new_key_is_found_once_the_old_ones_have_expired(
    issuer: Issuer, authority: trustme.CA
) -> None:
    subjects = _subjects(issuer, authority, keys_seconds=0.2)
    assert await subjects.subject_of(issuer.token()) == "robot"
    issuer.keys = {"2": ec.generate_private_key(ec.SECP256R1())}
    time.sleep(0.25)
    assert await subjects.subject_of(issuer.token("2", "2")) == "robot"


async def test_an_issuer_that_is_away_refuses_nobody_whose_key_is_known(
    issuer: Issuer, authority: trustme.CA
) -> None:
    subjects = _subjects(issuer, authority, keys_seconds=0.2)
    assert await subjects.subject_of(issuer.token()) == "robot"
    issuer.is_away = True
    time.sleep(0.25)
    for _ in range(20):
        assert await subjects.subject_of(issuer.token()) == "robot"
        assert await subjects.subject_of(issuer.token(kid="unknown")) is None
    assert issuer.num_fetches == 2


async def test_an_issuer_that_was_never_there_is_not_asked_for_every_token(
    issuer: Issuer, authority: trustme.CA
) -> None:
    issuer.is_away = True
    subjects = _subjects(issuer, authority)
    for _ in range(5):
        assert await subjects.subject_of(issuer.token()) is None
    assert issuer.num_fetches == 1


async def test_keys_from_a_server_that_nobody_vouches_for_are_not_taken(issuer: Issuer) -> None:
    assert await _subjects(issuer, None).subject_of(issuer.token()) is None


@pytest.mark.parametrize(
    "setting",
    [
        {"jwt_issuer": "http://issuer.example"},
        {"jwt_issuer": ISSUER, "jwt_jwks_url": "http://10.0.0.1/keys"},
        {"jwt_issuer": ISSUER, "jwt_jwks_url": "file:///etc/keys"},
    ],
)
def test_keys_come_over_https_or_from_this_machine(setting: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="must begin with https://"):
        ServiceSettings(access_file="access.toml", **setting)
    ServiceSettings(
        access_file="access.toml", jwt_issuer=ISSUER, jwt_jwks_url="http://127.0.0.1:8080/keys"
    )
