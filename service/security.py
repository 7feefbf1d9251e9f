"""Who may call: open access, or bearer tokens known by their hashes."""

from collections.abc import Mapping

from service.calls import Principal

ANONYMOUS = "anonymous"


class OpenAccess:
    """Everybody may do everything, as the tenant "anonymous"."""

    def authenticate(self, method: str, metadata: Mapping[str, str]) -> Principal:
        return Principal(tenant=ANONYMOUS)
