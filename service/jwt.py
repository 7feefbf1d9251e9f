"""JSON Web Tokens of an OpenID Connect issuer, checked against its published keys.

Needs the extra `oidc` (PyJWT with cryptography).
"""

import asyncio
import logging
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jwt

_ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "EdDSA")  # none with a secret
_FETCH_SECONDS = 5
_ASK_AGAIN_SECONDS = 10.0
_KEEP_SECONDS = 24 * 3600.0

_log = logging.getLogger(__name__)


class IssuerKeys(jwt.PyJWKClient):
    """The issuer's keys, as PyJWT keeps them: fetched again after `lifespan`, and for an unknown
    key at most once per `cooldown_duration`.

    While the issuer does not answer, its last keys are used for up to a day, and it is asked
    again every ten seconds rather than for every token. One thread at a time.
    """

    _last_keys: Any = None
    _fetched_at = 0.0
    _ask_again_at = 0.0

    def fetch_data(self) -> Any:
        """The key set. Raises PyJWKClientError when there is none."""
        now = time.monotonic()
        if now < self._ask_again_at:
            return self._last_or_raise(jwt.PyJWKClientError("the issuer did not answer"))
        try:
            keys = super().fetch_data()
        except jwt.PyJWTError as error:
            _log.warning("no keys from %s: %s", self.uri, error)
            self._ask_again_at = now + _ASK_AGAIN_SECONDS
            return self._last_or_raise(error)
        self._last_keys, self._fetched_at = keys, now
        return keys

    def _last_or_raise(self, error: Exception) -> Any:
        if self._last_keys is None or time.monotonic() > self._fetched_at + _KEEP_SECONDS:
            raise error
        return self._last_keys


class JwtSubjects:
    """Finds the subject of a token that the issuer signed for the audience and that is in time.

    Keys are fetched from jwks_url when needed, in a thread, and kept for keys_seconds.
    ssl_context: for an issuer whose certificate the system does not trust.
    """

    def __init__(
        self,
        issuer: str,
        audience: str,
        jwks_url: str,
        *,
        keys_seconds: float = 300,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = IssuerKeys(
            jwks_url, lifespan=keys_seconds, timeout=_FETCH_SECONDS, ssl_context=ssl_context
        )
        # Of its own: an issuer that does not answer must not hold up other work in threads.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="jwt")

    async def subject_of(self, token: str) -> str | None:
        if token.count(".") != 2:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._subject_of, token)

    def _subject_of(self, token: str) -> str | None:
        try:
            key = self._keys.get_signing_key_from_jwt(token)
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                options={"require": ["exp", "sub", "aud", "iss"]},
            )
        except jwt.PyJWTError as error:
            _log.info("refused a token: %s", type(error).__name__)
            return None
        return str(claims["sub"])
