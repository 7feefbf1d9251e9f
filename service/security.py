"""Who may call: open access, or bearer tokens and client certificates that an access file knows.

The access file is TOML. It holds hashes, never tokens, and is read again on SIGHUP:

    [tenants.acme]
    token_sha256 = ["9f86d081..."]          # printf %s "$TOKEN" | sha256sum
    certificates = ["acme-backend"]         # common or alternative names, with mutual TLS
    jwt_subjects = ["acme-service"]         # with TANDEM_JWT_ISSUER
    models = ["smollm2-135m-instruct"]      # left out: all
    max_live_requests = 8
    tokens_per_second = 2000
    burst_tokens = 50000
    capture = false                         # its prompts are never kept; left out: they may be
"""

import hashlib
import hmac
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from service.admission import TenantQuota
from service.calls import Principal
from service.errors import unauthenticated

ANONYMOUS = "anonymous"
_BEARER = "bearer "
_KEYS = {
    "token_sha256",
    "certificates",
    "jwt_subjects",
    "models",
    "max_live_requests",
    "tokens_per_second",
    "burst_tokens",
    "capture",
}


class AccessFileError(ValueError):
    """The access file cannot be used; the message names the tenant and the key."""


class OpenAccess:
    """Everybody may do everything, as the tenant "anonymous"."""

    async def authenticate(
        self, method: str, metadata: Mapping[str, str], peer_names: Iterable[str]
    ) -> Principal:
        return Principal(tenant=ANONYMOUS)

    def reload(self) -> None:
        """There is nothing to read."""


@dataclass(frozen=True, slots=True)
class AccessList:
    """What an access file says. digests: (SHA-256 of a token, its tenant)."""

    principals: Mapping[str, Principal]
    digests: tuple[tuple[bytes, str], ...]
    certificates: Mapping[str, str]
    jwt_subjects: Mapping[str, str]

    def by_token(self, token: str) -> Principal | None:
        """Compares with every digest in constant time, so that time tells nothing."""
        digest = hashlib.sha256(token.encode()).digest()
        found: str | None = None
        for known, tenant in self.digests:
            if hmac.compare_digest(digest, known):
                found = tenant
        return None if found is None else self.principals[found]


def read_access_file(path: Path) -> AccessList:
    """Raises AccessFileError or OSError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AccessFileError(f"{path}: {error}") from error
    tenants = document.get("tenants")
    if not isinstance(tenants, dict) or not tenants:
        raise AccessFileError(f"{path}: needs at least one [tenants.NAME]")
    principals: dict[str, Principal] = {}
    digests: list[tuple[bytes, str]] = []
    certificates: dict[str, str] = {}
    subjects: dict[str, str] = {}
    for name, entry in tenants.items():
        where = f"{path}: tenants.{name}"
        principals[name] = _read_principal(where, name, entry)
        digests += [(_read_digest(where, text), name) for text in entry.get("token_sha256", ())]
        for key, known in (("certificates", certificates), ("jwt_subjects", subjects)):
            for value in entry.get(key, ()):
                if known.setdefault(value, name) != name:
                    raise AccessFileError(f"{where}.{key}: {value!r} belongs to another tenant")
    return AccessList(principals, tuple(digests), certificates, subjects)


def _read_principal(where: str, name: str, entry: Any) -> Principal:
    if not isinstance(entry, dict):
        raise AccessFileError(f"{where}: must be a table")
    unknown = entry.keys() - _KEYS
    if unknown:
        raise AccessFileError(f"{where}: unknown keys {sorted(unknown)}")
    rate, burst = entry.get("tokens_per_second"), entry.get("burst_tokens", 0)
    if rate is not None and (rate <= 0 or burst <= 0):
        raise AccessFileError(f"{where}: tokens_per_second and burst_tokens must be positive")
    may_be_captured = entry.get("capture", True)
    if not isinstance(may_be_captured, bool):
        raise AccessFileError(f"{where}.capture: must be true or false")
    return Principal(
        tenant=name,
        may_be_captured=may_be_captured,
        quota=TenantQuota(
            max_live_requests=entry.get("max_live_requests"),
            tokens_per_second=rate,
            burst_tokens=burst,
        ),
        models=frozenset(entry.get("models", ())),
    )


def _read_digest(where: str, text: object) -> bytes:
    try:
        digest = bytes.fromhex(str(text))
    except ValueError as error:
        raise AccessFileError(f"{where}.token_sha256: not hexadecimal") from error
    if len(digest) != hashlib.sha256().digest_size:
        raise AccessFileError(f"{where}.token_sha256: not a SHA-256")
    return digest


class SubjectFinder(Protocol):
    """Checks a JWT; the subject it is about, or None when it cannot be trusted."""

    async def subject_of(self, token: str) -> str | None: ...


class ListedAccess:
    """Only who is in the access file may call, health and reflection included.

    Health is open when health_is_open, for probes that cannot carry a token.
    """

    def __init__(
        self, path: Path, *, health_is_open: bool, subjects: SubjectFinder | None = None
    ) -> None:
        self._path = path
        self._health_is_open = health_is_open
        self._subjects = subjects
        self._list = read_access_file(path)

    def reload(self) -> None:
        """Read the file again; when it cannot be used the former list stays and this raises."""
        self._list = read_access_file(self._path)

    async def authenticate(
        self, method: str, metadata: Mapping[str, str], peer_names: Iterable[str]
    ) -> Principal:
        if self._health_is_open and method.startswith("grpc.health.v1.Health/"):
            return Principal(tenant=ANONYMOUS)
        access = self._list
        for name in peer_names:
            if name in access.certificates:
                return access.principals[access.certificates[name]]
        principal = await self._by_token(access, metadata.get("authorization", ""))
        if principal is None:
            raise unauthenticated("a valid bearer token or client certificate is needed")
        return principal

    async def _by_token(self, access: AccessList, authorization: str) -> Principal | None:
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None
        token = authorization[len(_BEARER) :].strip()
        principal = access.by_token(token)
        if principal is None and self._subjects is not None:
            subject = await self._subjects.subject_of(token)
            tenant = access.jwt_subjects.get(subject) if subject is not None else None
            principal = None if tenant is None else access.principals[tenant]
        return principal
