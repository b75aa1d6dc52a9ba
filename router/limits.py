"""Owns what each tenant uses now: outputs in flight, and a bucket of tokens. The caller brings the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import RateLimited, RequestError
from router.tenants import Tenant


class TokenBucket:
    """Fills at a rate up to one minute's worth; may be overdrawn, and is paid back before anything else is let in.

    So a call needs no guess of its length, and the average still is the rate.
    """

    def __init__(self, tokens_per_minute: int, now: float) -> None:
        self._rate = tokens_per_minute / 60.0
        self._capacity = float(tokens_per_minute)
        self._level = self._capacity
        self._at = now

    def charge(self, tokens: int, now: float) -> None:
        self._fill(now)
        self._level -= tokens

    def wait_s(self, now: float) -> float:
        """Until it is not overdrawn any more; 0 if it is not."""
        self._fill(now)
        return max(0.0, -self._level / self._rate)

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._rate)
        self._at = now


class TenantLimits:
    """Invariant: a tenant's count is the sum of `num_outputs` of its `admit` and `hold` blocks that run."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._buckets: dict[str, TokenBucket] = {}

    @contextmanager
    def admit(self, tenant: Tenant, num_outputs: int, now: float) -> Iterator[None]:
        """Raises `RateLimited` with the time to wait, or `RequestError` if the call can never be let in."""
        with self.hold(tenant, num_outputs):
            wait_s = self._bucket_wait_s(tenant, now)
            if wait_s > 0:
                raise RateLimited(
                    f"tenant {tenant.name!r} has used its {tenant.tokens_per_minute} tokens per minute", wait_s
                )
            yield

    @contextmanager
    def hold(self, tenant: Tenant, num_outputs: int) -> Iterator[None]:
        """`admit` for what makes no tokens: limited at once, and not by the minute."""
        limit = tenant.max_concurrent_requests
        if limit is not None and num_outputs > limit:
            raise RequestError("n", f"at most {limit} outputs at once for tenant {tenant.name!r}, got {num_outputs}")
        if limit is not None and self._running[tenant.name] + num_outputs > limit:
            raise RateLimited(f"tenant {tenant.name!r} may have {limit} outputs at once; try again when one is done")
        self._running[tenant.name] += num_outputs
        try:
            yield
        finally:
            self._running[tenant.name] -= num_outputs
            if not self._running[tenant.name]:
                del self._running[tenant.name]

    def charge(self, tenant: Tenant, tokens: int, now: float) -> None:
        if tenant.tokens_per_minute is not None:
            self._bucket(tenant, tenant.tokens_per_minute, now).charge(tokens, now)

    def check_idle(self) -> None:
        assert not self._running, f"outputs were left: {dict(self._running)}"

    def _bucket_wait_s(self, tenant: Tenant, now: float) -> float:
        if tenant.tokens_per_minute is None:
            return 0.0
        return self._bucket(tenant, tenant.tokens_per_minute, now).wait_s(now)

    def _bucket(self, tenant: Tenant, tokens_per_minute: int, now: float) -> TokenBucket:
        if tenant.name not in self._buckets:
            self._buckets[tenant.name] = TokenBucket(tokens_per_minute, now)
        return self._buckets[tenant.name]
