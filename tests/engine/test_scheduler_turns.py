"""Whose turn it is: priorities, tenants, ageing, and who gives way."""

from __future__ import annotations

from collections import Counter

import pytest
from scheduler_model import PolicyFactory, tokens

from engine.errors import QueueFull
from engine.request import Request, RequestStatus

STEP_S = 10.0  # SchedulerConfig.priority_step_s


def running(*requests: Request) -> list[bool]:
    return [request.status is RequestStatus.RUNNING for request in requests]


def test_the_better_priority_is_admitted_first(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1)
    first, urgent, later = policy.add([1]), policy.add([2], priority=-1), policy.add([3], priority=1)
    policy.step()
    assert running(first, urgent, later) == [False, True, False]


def test_of_one_priority_and_tenant_the_oldest_is_admitted_first(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1)
    first, second = policy.add([1], priority=2), policy.add([2], priority=2)
    policy.step()
    assert running(first, second) == [True, False]


def test_a_flood_of_one_tenant_delays_another_by_one_request(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1, max_waiting=32)
    flood = [policy.add([i, i], scope=b"flood", max_tokens=1) for i in range(20)]
    policy.step()
    other = policy.add([1], scope=b"other", max_tokens=1)
    assert [policy.step()[0][0] for _ in range(3)] == [flood[1], other, flood[2]]


def test_two_tenants_that_keep_waiting_are_served_the_same_tokens(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=64, max_num_seqs=2, max_waiting=80)
    for i in range(30):
        policy.add(tokens(12, first=20 * i), scope=b"long", max_tokens=8)
        policy.add(tokens(2, first=20 * i), scope=b"short", max_tokens=3)
    served: Counter[bytes] = Counter()
    for _ in range(40):
        for request, num_tokens in policy.step():
            served[request.scope] += num_tokens
    assert abs(served[b"long"] - served[b"short"]) <= 2 * 20
    assert served[b"short"] > 60


def test_being_idle_saves_up_no_claim(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1, max_waiting=32)
    for i in range(8):
        policy.add(tokens(2, first=9 * i), scope=b"busy", max_tokens=2)
    for _ in range(6):
        policy.step()
    for i in range(4):
        policy.add(tokens(2, first=100 + 9 * i), scope=b"late", max_tokens=2)
    turns: list[bytes] = []
    for _ in range(12):
        turns += [request.scope for request, num_tokens in policy.step() if num_tokens == 2]
    assert turns[:6] == [b"busy", b"late"] * 3


def test_a_low_priority_has_its_turn_after_a_bounded_wait_whatever_comes_in(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1, max_waiting=200)
    low = [policy.add([1, i], priority=3, max_tokens=1) for i in range(2)]
    turns: list[float] = []
    for second in range(80):
        policy.now = float(second)
        policy.add([5, second], max_tokens=1)
        policy.add([6, second], max_tokens=1)
        turns += [policy.now for request, _ in policy.step() if request in low]
    assert turns == [3 * STEP_S, 6 * STEP_S]


def test_age_does_not_lift_a_flood_above_its_share(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=1, max_waiting=64)
    for i in range(40):
        policy.add([1, i], scope=b"flood", max_tokens=1)
    policy.now = 5 * STEP_S
    for i in range(5):
        policy.add([2, i], scope=b"other", max_tokens=1)
    turns = [policy.step()[0][0].scope for _ in range(10)]
    assert turns == [b"flood", b"other"] * 5


def test_the_worst_priority_gives_way_although_it_came_first(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=6)
    low = policy.add(tokens(4), max_tokens=17, priority=1)
    first, second = (policy.add(tokens(4, first=20 * i), max_tokens=17) for i in (1, 2))
    while low.num_preemptions + first.num_preemptions + second.num_preemptions == 0:
        policy.step()
    assert [low.num_preemptions, first.num_preemptions, second.num_preemptions] == [1, 0, 0]


def test_the_oldest_of_the_best_priority_never_gives_way(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=6)
    requests = [policy.add(tokens(4, first=20 * i), max_tokens=17, priority=-i) for i in range(4)]
    while policy.scheduler.has_work():
        policy.step()
    assert requests[3].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert all(request.num_output_tokens == 17 for request in requests)


def test_a_request_that_waited_long_is_not_the_first_to_give_way_again(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=6, max_num_seqs=2)
    blocking = policy.add(tokens(12), max_tokens=9)
    policy.step()
    low = policy.add(tokens(4, first=30), max_tokens=17, priority=1)
    policy.now = STEP_S
    policy.add(tokens(4, first=50), max_tokens=17)
    while blocking.status is not RequestStatus.FINISHED:
        policy.step()
    policy.step()
    assert (low.status, low.level) == (RequestStatus.RUNNING, 0)
    before = low.num_preemptions
    while policy.scheduler.has_work():
        policy.step()
    assert policy.scheduler.stats().preemptions > before
    assert low.num_preemptions == before


def test_an_urgent_prompt_overtakes_the_chunks_of_a_long_one(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    long = policy.add(tokens(60))
    policy.step()
    urgent = policy.add(tokens(8, first=70), priority=-1)
    assert policy.step() == [(urgent, 8), (long, 8)]


def test_two_tenants_prompts_share_the_budget(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=64, budget=16)
    first = policy.add(tokens(24), scope=b"long")
    second = policy.add(tokens(40, first=100), scope=b"long")
    assert policy.step() == [(first, 16)]
    short = policy.add(tokens(6, first=70), scope=b"short")
    assert policy.step() == [(first, 8), (second, 8)]  # equal shares: the older one
    assert policy.step() == [(first, 1), (short, 6), (second, 9)]


def test_the_last_eighth_of_the_queue_is_for_other_tenants(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_waiting=16)
    for i in range(14):
        policy.add([i], scope=b"flood")
    with pytest.raises(QueueFull, match="14 of them of this tenant; the last 2 places of max_waiting 16"):
        policy.add([99], scope=b"flood")
    policy.add([1], scope=b"other")
    policy.add([2], scope=b"third")
    with pytest.raises(QueueFull, match="max_waiting is 16"):
        policy.add([3], scope=b"fourth")
    assert policy.scheduler.stats().waiting == 16


def test_a_forked_request_runs_with_the_precedence_of_its_parent(make_policy: PolicyFactory) -> None:
    policy = make_policy()
    parent = policy.add(tokens(4), priority=-2)
    policy.step()
    child = policy.add([*tokens(4), 9], priority=5)
    policy.scheduler.fork(parent, child, 4)
    assert (child.status, child.level) == (RequestStatus.RUNNING, -2)
