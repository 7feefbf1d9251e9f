"""Who may enter: a bounded queue, quotas per tenant, and the wait that a newcomer has to expect.

Everything is counted in requests and in tokens (prompt plus the most that may be output).
Used on the event loop alone; instants are `time.monotonic()` seconds.
"""

from dataclasses import dataclass


class RefusedError(Exception):
    """Not admitted. subject is "server", or "tenant" when its quota is used up."""

    def __init__(self, subject: str, reason: str, retry_after_seconds: float) -> None:
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class DeadlineRefusedError(Exception):
    """The deadline is earlier than the expected end of the wait."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """num_rows requests run at once; so many more, and so many of their tokens, may wait."""

    num_rows: int
    max_waiting_requests: int
    max_waiting_tokens: int


@dataclass(frozen=True, slots=True)
class TenantQuota:
    """None: unlimited. burst_tokens is what may be used at once after a time of rest."""

    max_live_requests: int | None = None
    tokens_per_second: float | None = None
    burst_tokens: int = 0


UNLIMITED = TenantQuota()


@dataclass(slots=True)
class _TenantUse:
    num_live: int = 0
    available_tokens: float = 0.0
    refilled_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A place that has been given; hand it back once, with `Admission.release`."""

    tenant: str
    num_requests: int
    num_tokens: int


@dataclass(slots=True)
class _RecentRatio:
    """A ratio of two sums in which older terms count less."""

    decay: float
    numerator: float = 0.0
    denominator: float = 0.0

    def add(self, numerator: float, denominator: float) -> None:
        self.numerator = self.numerator * self.decay + numerator
        self.denominator = self.denominator * self.decay + denominator

    @property
    def value(self) -> float | None:
        return self.numerator / self.denominator if self.numerator and self.denominator else None


class Admission:
    """Gives places and takes them back."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._num_live = 0
        self._num_live_tokens = 0
        self._tenants: dict[str, _TenantUse] = {}
        self._tokens_per_second = _RecentRatio(decay=0.99)  # over steps
        self._used_share = _RecentRatio(decay=0.95)  # over requests: few use all they may

    @property
    def num_live(self) -> int:
        return self._num_live

    @property
    def num_live_tokens(self) -> int:
        return self._num_live_tokens

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step computed num_tokens in so many seconds."""
        self._tokens_per_second.add(num_tokens, seconds)

    def estimated_wait_seconds(self) -> float | None:
        """How long a newcomer waits for a row; None while nothing is known."""
        if self._num_live < self._limits.num_rows:
            return 0.0
        speed = self._tokens_per_second.value
        if speed is None:
            return None
        num_ahead = self._num_live - self._limits.num_rows + 1
        used_share = self._used_share.value or 1.0
        tokens_per_request = self._num_live_tokens / self._num_live * used_share
        return num_ahead * tokens_per_request / speed

    def admit(
        self,
        tenant: str,
        quota: TenantQuota,
        num_requests: int,
        num_tokens: int,
        now: float,
        seconds_to_deadline: float | None,
    ) -> Ticket:
        """A place for num_requests with num_tokens in all, or RefusedError or
        DeadlineRefusedError."""
        self._check_queue(num_requests, num_tokens)
        wait = self.estimated_wait_seconds()
        if seconds_to_deadline is not None and wait is not None and wait > seconds_to_deadline:
            raise DeadlineRefusedError(
                f"the wait is about {wait:.1f} s and the deadline is in {seconds_to_deadline:.1f} s"
            )
        self._charge_tenant(tenant, quota, num_requests, num_tokens, now)
        self._num_live += num_requests
        self._num_live_tokens += num_tokens
        return Ticket(tenant, num_requests, num_tokens)

    def release(self, ticket: Ticket, num_used_tokens: int, now: float, quota: TenantQuota) -> None:
        """Take a place back; tokens that were not used go back to the tenant's quota."""
        self._num_live -= ticket.num_requests
        self._num_live_tokens -= ticket.num_tokens
        self._used_share.add(num_used_tokens, ticket.num_tokens)
        use = self._tenants[ticket.tenant]
        use.num_live -= ticket.num_requests
        if quota.tokens_per_second is not None:
            self._refill(use, quota, now)
            unused = max(0, ticket.num_tokens - num_used_tokens)
            use.available_tokens = min(use.available_tokens + unused, float(quota.burst_tokens))
        elif use.num_live == 0:
            del self._tenants[ticket.tenant]

    def _check_queue(self, num_requests: int, num_tokens: int) -> None:
        limits = self._limits
        num_waiting = self._num_live + num_requests - limits.num_rows
        if num_waiting <= 0:
            return
        wait = self.estimated_wait_seconds()
        retry_after = 1.0 if wait is None else max(wait, 0.1)
        if num_waiting > limits.max_waiting_requests:
            raise RefusedError(
                "server",
                f"the queue of {limits.max_waiting_requests} requests is full",
                retry_after,
            )
        waiting_share = num_waiting / (self._num_live + num_requests)
        num_waiting_tokens = int((self._num_live_tokens + num_tokens) * waiting_share)
        if num_waiting_tokens > limits.max_waiting_tokens:
            raise RefusedError(
                "server", f"the queue of {limits.max_waiting_tokens} tokens is full", retry_after
            )

    def _charge_tenant(
        self, tenant: str, quota: TenantQuota, num_requests: int, num_tokens: int, now: float
    ) -> None:
        use = self._tenants.get(tenant)
        if use is None:
            use = _TenantUse(available_tokens=float(quota.burst_tokens), refilled_at=now)
        live_limit = quota.max_live_requests
        if live_limit is not None and use.num_live + num_requests > live_limit:
            raise RefusedError("tenant", f"at most {live_limit} requests at the same time", 1.0)
        if quota.tokens_per_second is not None:
            self._refill(use, quota, now)
            missing = num_tokens - use.available_tokens
            if missing > 0:
                raise RefusedError(
                    "tenant",
                    f"{num_tokens} tokens asked for, {int(use.available_tokens)} available",
                    missing / quota.tokens_per_second,
                )
            use.available_tokens -= num_tokens
        use.num_live += num_requests
        self._tenants[tenant] = use

    @staticmethod
    def _refill(use: _TenantUse, quota: TenantQuota, now: float) -> None:
        assert quota.tokens_per_second is not None  # noqa: S101 - both callers ask first
        gained = (now - use.refilled_at) * quota.tokens_per_second
        use.available_tokens = min(use.available_tokens + gained, float(quota.burst_tokens))
        use.refilled_at = now
