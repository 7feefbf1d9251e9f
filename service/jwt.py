"""JSON Web Tokens of an OpenID Connect issuer, checked against its published keys.

Needs the extra `oidc` (PyJWT with cryptography).
"""

import asyncio
import logging

import jwt

_ALGORITHMS = ("RS256", "RS384", "RS512", "ES256", "ES384", "PS256", "EdDSA")  # none with a secret
_FETCH_SECONDS = 5

_log = logging.getLogger(__name__)


class JwtSubjects:
    """Finds the subject of a token that the issuer signed for the audience and that is in time.

    Keys are fetched from jwks_url when needed, in a thread, and kept for keys_seconds.
    """

    def __init__(
        self, issuer: str, audience: str, jwks_url: str, *, keys_seconds: float = 300
    ) -> None:
        self._issuer = issuer
        self._audience = audience
        self._keys = jwt.PyJWKClient(jwks_url, lifespan=keys_seconds, timeout=_FETCH_SECONDS)

    async def subject_of(self, token: str) -> str | None:
        if token.count(".") != 2:
            return None
        return await asyncio.to_thread(self._subject_of, token)

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
