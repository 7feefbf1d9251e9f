"""Tenants are known by a keyed hash, so that the ledger can be shared and a key forgotten."""

import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from telemetry.ledger.records import TenantRecord

_HEX_DIGITS = 32
_MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class TenantKey:
    """The key of the hash. `key_id` names it in the ledger; the secret appears nowhere.

    Rotation: start with another key. New rows carry new pseudonyms under its id, and once the
    old key is destroyed the old ones can no longer be linked to a name.
    """

    key_id: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if not self.key_id or len(self.key_id) > 32:
            raise ValueError("a tenant key needs an id of at most 32 characters")
        if len(self.secret) < _MIN_SECRET_BYTES:
            raise ValueError(f"a tenant key needs at least {_MIN_SECRET_BYTES} bytes")

    def pseudonym(self, tenant: str) -> TenantRecord | None:
        """None for the empty name: the caller is not known."""
        if not tenant:
            return None
        digest = hmac.new(self.secret, tenant.encode(errors="replace"), hashlib.sha256).hexdigest()
        return TenantRecord(digest[:_HEX_DIGITS], self.key_id)


def load_or_create_key(path: Path) -> TenantKey:
    """The key in a file of `<key id> <hex secret>`; makes a random one where there is no file.

    The file is readable by its owner only. Raises ValueError when it holds something else.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = f"{secrets.token_hex(4)} {secrets.token_hex(32)}\n"
        staged = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        # A link fails where another process was quicker; its key then counts.
        try:
            os.link(staged, path)
        except FileExistsError:
            pass
        finally:
            staged.unlink()
    key_id, _, secret = path.read_text().strip().partition(" ")
    try:
        return TenantKey(key_id, bytes.fromhex(secret))
    except ValueError as error:
        raise ValueError(f"{path} is no tenant key file: {error}") from None
