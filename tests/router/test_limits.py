"""What a tenant may use at once and in a minute. The clock is the test's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RateLimited, RequestError
from router.limits import TenantLimits, TokenBucket
from router.tenants import Tenant

THREE_AT_ONCE = Tenant(name="acme", scope=b"a", max_concurrent_requests=3)
SIXTY_A_MINUTE = Tenant(name="acme", scope=b"a", tokens_per_minute=60)


def test_outputs_at_once_are_limited_and_a_place_is_free_again_at_the_end() -> None:
    limits = TenantLimits()
    with limits.admit(THREE_AT_ONCE, 2, now=0.0):
        with (
            pytest.raises(RateLimited, match="may have 3 outputs at once") as caught,
            limits.admit(THREE_AT_ONCE, 2, 0.0),
        ):
            pass
        assert caught.value.retry_after_s is None
        with limits.admit(THREE_AT_ONCE, 1, now=0.0):
            pass
    with limits.admit(THREE_AT_ONCE, 3, now=0.0):
        pass
    limits.check_idle()


def test_a_call_that_ends_badly_gives_its_places_back() -> None:
    limits = TenantLimits()
    with pytest.raises(ZeroDivisionError), limits.admit(THREE_AT_ONCE, 3, now=0.0):
        _ = 1 / 0
    limits.check_idle()


def test_a_call_for_more_outputs_than_the_tenant_may_have_can_never_be_served() -> None:
    with pytest.raises(RequestError, match="n: at most 3 outputs"), TenantLimits().admit(THREE_AT_ONCE, 4, now=0.0):
        pass


def test_one_tenants_use_is_not_anothers() -> None:
    limits = TenantLimits()
    other = Tenant(name="other", scope=b"b", max_concurrent_requests=3)
    with limits.admit(THREE_AT_ONCE, 3, now=0.0), limits.admit(other, 3, now=0.0):
        pass
    limits.charge(SIXTY_A_MINUTE, 1000, now=0.0)
    with limits.admit(Tenant(name="third", scope=b"c", tokens_per_minute=60), 1, now=0.0):
        pass
    limits.check_idle()


def test_tokens_over_the_rate_are_paid_back_before_the_next_call_and_the_hint_says_when() -> None:
    limits = TenantLimits()
    with limits.admit(SIXTY_A_MINUTE, 1, now=0.0):
        limits.charge(SIXTY_A_MINUTE, 90, now=0.0)
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught, limits.admit(SIXTY_A_MINUTE, 1, now=10.0):
        pass
    assert caught.value.retry_after_s == pytest.approx(20.0)
    with limits.admit(SIXTY_A_MINUTE, 1, now=10.0 + 20.0):
        pass


def test_a_pause_saves_one_minutes_tokens_and_no_more() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.charge(60, now=1000.0)
    assert bucket.wait_s(1000.0) == 0.0
    bucket.charge(1, now=1000.0)
    assert bucket.wait_s(1000.0) == pytest.approx(1.0)


@given(
    calls=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 30)), max_size=30),
    tokens_per_minute=st.integers(1, 10_000),
)
def test_whoever_keeps_to_the_hints_never_gets_more_than_the_rate_and_what_one_call_adds(
    calls: list[tuple[int, float]], tokens_per_minute: int
) -> None:
    limits, tenant = TenantLimits(), Tenant(name="t", scope=b"", tokens_per_minute=tokens_per_minute)
    now, used, largest = 0.0, 0, 0
    for tokens, pause in calls:
        now += pause
        try:
            with limits.admit(tenant, 1, now):
                limits.charge(tenant, tokens, now)
        except RateLimited as error:
            now += (error.retry_after_s or 0.0) + 1e-6
            with limits.admit(tenant, 1, now):
                limits.charge(tenant, tokens, now)
        used, largest = used + tokens, max(largest, tokens)
        assert used <= tokens_per_minute * (1 + now / 60) + largest + 1e-3
    limits.check_idle()
