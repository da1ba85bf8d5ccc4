"""What each tenant may have in flight and spend, and has. Pure: the clock is passed in.

Tokens are a bucket (a token bucket in both senses): it holds one minute's worth, refills steadily, and is charged with
a prompt's tokens when it is admitted and with output tokens as they are emitted. Output may leave it in debt, since a
running answer is never cut off; new requests then wait until the debt is paid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from protos.errors import CapacityError

RETRY_MS = 1000
"""Where room comes back when another request of the tenant ends, which nobody can tell beforehand."""


@dataclass(frozen=True)
class TenantLimits:
    """None: no limit. max_request_bytes: of all requests in flight, as received."""

    max_requests: int | None = None
    max_request_bytes: int | None = None
    tokens_per_minute: int | None = None


NO_LIMITS = TenantLimits()


@dataclass
class _Use:
    num_requests: int = 0
    num_bytes: int = 0
    spent: float = 0.0  # tokens that the bucket lacks to be full; more than it holds is debt
    at_s: float = 0.0


@dataclass(frozen=True)
class TenantUse:
    """A tenant's gauges. tokens_left: of the bucket, negative in debt; None without a limit."""

    num_requests: int
    num_bytes: int
    tokens_left: float | None


class Tenants:
    """All tenants of one router."""

    def __init__(self, limits_of: Callable[[str], TenantLimits], now_s: Callable[[], float]) -> None:
        """limits_of: asked at each use, so that changed limits hold from then on. now_s: a monotonic clock, seconds."""
        self._limits_of = limits_of
        self._now_s = now_s
        self._uses: dict[str, _Use] = {}

    def enter(self, tenant: str) -> None:
        """Counts a request, until leave().

        Raises:
            CapacityError: TENANT_LIMIT_REQUESTS; TENANT_LIMIT_TOKENS when not a single token is left.
        """
        limits, use = self._limits_of(tenant), self._use(tenant)
        if limits.max_requests is not None and use.num_requests >= limits.max_requests:
            raise CapacityError(
                "this tenant has too many requests in flight",
                reason="TENANT_LIMIT_REQUESTS",
                given=f"{use.num_requests} in flight",
                allowed=limits.max_requests,
                retry_after_ms=RETRY_MS,
            )
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, use, 1)
        use.num_requests += 1
        self._uses[tenant] = use

    def leave(self, tenant: str, num_bytes: int = 0) -> None:
        """The request has ended. num_bytes: what it held."""
        use = self._uses[tenant]
        use.num_requests -= 1
        use.num_bytes -= num_bytes
        self._forget_if_idle(tenant, use)

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Counts the bytes of a request that has entered, until it leaves.

        Raises:
            CapacityError: TENANT_LIMIT_BYTES; without a retry hint where the request alone is too large.
        """
        allowed, use = self._limits_of(tenant).max_request_bytes, self._uses[tenant]
        if allowed is not None and use.num_bytes + num_bytes > allowed:
            raise CapacityError(
                "this tenant's requests in flight are too large together",
                reason="TENANT_LIMIT_BYTES",
                given=f"{num_bytes} bytes beside {use.num_bytes} in flight",
                allowed=f"{allowed} bytes",
                retry_after_ms=RETRY_MS if num_bytes <= allowed else None,
            )
        use.num_bytes += num_bytes

    def admit_prompt(self, tenant: str, num_tokens: int) -> None:
        """Charges a prompt of a request that has entered. One that is larger than the bucket needs a full one.

        Raises:
            CapacityError: TENANT_LIMIT_TOKENS, with the time after which there is enough if nothing else is charged.
        """
        limits = self._limits_of(tenant)
        if limits.tokens_per_minute is not None:
            self._check_tokens(limits.tokens_per_minute, self._uses[tenant], num_tokens)
            self.charge(tenant, num_tokens)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Charges output tokens, or gives a prompt's back (negative) that no worker has seen."""
        limits = self._limits_of(tenant)
        if limits.tokens_per_minute is not None:
            use = self._uses[tenant]
            self._refill(limits.tokens_per_minute, use)
            use.spent = max(0.0, use.spent + num_tokens)

    def in_use(self) -> dict[str, TenantUse]:
        """Tenants with requests in flight or a bucket that is not full."""
        shown = {}
        for tenant, use in list(self._uses.items()):
            rate = self._limits_of(tenant).tokens_per_minute
            if rate is not None:
                self._refill(rate, use)
            shown[tenant] = TenantUse(use.num_requests, use.num_bytes, None if rate is None else rate - use.spent)
            self._forget_if_idle(tenant, use)
        return shown

    def _use(self, tenant: str) -> _Use:
        return self._uses.get(tenant) or _Use(at_s=self._now_s())

    def _check_tokens(self, rate: int, use: _Use, num_tokens: int) -> None:
        self._refill(rate, use)
        lacking = min(num_tokens, rate) - (rate - use.spent)
        if lacking > 0:
            raise CapacityError(
                "this tenant has used up its tokens a minute",
                reason="TENANT_LIMIT_TOKENS",
                given=f"{num_tokens} more tokens with {math.floor(rate - use.spent)} left",
                allowed=f"{rate} a minute, of prompts and outputs",
                retry_after_ms=math.ceil(lacking * 60_000 / rate),
            )

    def _refill(self, tokens_per_minute: int, use: _Use) -> None:
        now_s = self._now_s()
        use.spent = max(0.0, use.spent - (now_s - use.at_s) * tokens_per_minute / 60)
        use.at_s = now_s

    def _forget_if_idle(self, tenant: str, use: _Use) -> None:
        """Where callers name their tenants as they like, remembering each would be a leak."""
        rate = self._limits_of(tenant).tokens_per_minute
        if rate is not None:
            self._refill(rate, use)
        if use.num_requests == 0 and (rate is None or use.spent == 0.0):
            del self._uses[tenant]
