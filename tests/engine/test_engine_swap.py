"""Blocks that leave the pool for host memory and come back, and requests that are preempted with their KV."""

from __future__ import annotations

import pytest
from factories import EngineHarness, HarnessFactory, make_request
from fakes import expected_output

from engine.request import Request, RequestKind, RequestStatus

PROMPT = list(range(30, 50))  # 5 full blocks
OTHER = list(range(200, 232))  # 8 full blocks


def run_alone(harness: EngineHarness, prompt: list[int], max_tokens: int = 2) -> Request:
    request = harness.submit(make_request(prompt, max_tokens=max_tokens))
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(prompt, max_tokens)
    return request


def two_that_do_not_fit(harness: EngineHarness) -> tuple[Request, Request]:
    """Steps until the second one was preempted."""
    first = harness.submit(make_request(PROMPT[:6], max_tokens=20))
    second = harness.submit(make_request(OTHER[:6], max_tokens=20))
    while second.num_preemptions == 0:
        harness.step()
    return first, second


def test_an_evicted_prefix_is_copied_back_and_not_computed_again(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=9, num_host_blocks=20)
    run_alone(harness, PROMPT)
    run_alone(harness, OTHER)
    assert harness.engine.stats().host.stored >= 4
    before = harness.model.num_tokens
    request = run_alone(harness, PROMPT)
    assert request.num_cached_tokens == 16
    assert harness.model.num_tokens - before == 4 + 1
    assert harness.engine.stats().host.restored > 0


def test_a_prefix_is_found_half_in_the_pool_and_half_in_host_memory(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=9, num_host_blocks=20)
    run_alone(harness, PROMPT)
    run_alone(harness, OTHER[:20])  # evicts the deepest of the first prompt
    restored = harness.engine.stats().host.restored
    request = run_alone(harness, PROMPT)
    assert request.num_cached_tokens == 16
    assert 0 < harness.engine.stats().host.restored - restored < 4


def test_a_restored_block_is_shared_like_any_other(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=12, num_host_blocks=20)
    run_alone(harness, PROMPT)
    run_alone(harness, [*OTHER, 1, 2, 3, 4])
    first, second = (harness.submit(make_request([*PROMPT, 7, i])) for i in range(2))
    harness.step()
    harness.step()
    assert first.block_table[:4] == second.block_table[:4]
    harness.run()
    assert all(harness.outputs[r.request_id] == harness.expected(r) for r in (first, second))


def test_what_does_not_fit_into_host_memory_is_computed_again(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=9, num_host_blocks=2)
    run_alone(harness, PROMPT)
    run_alone(harness, OTHER)
    assert run_alone(harness, PROMPT).num_cached_tokens == 8  # the first of the chain, which left the pool last
    assert harness.engine.stats().host.bytes_used <= 2 * harness.kv.layout.block_bytes


def test_a_reservation_asks_for_nothing_that_host_memory_has(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=9, num_host_blocks=20)
    run_alone(harness, PROMPT)
    run_alone(harness, OTHER)
    request = harness.reserve(make_request(PROMPT, kind=RequestKind.DECODE))
    harness.step()
    grant = harness.grants[request.request_id]
    assert grant.cached_tokens == 16
    assert [block.ordinal for block in grant.missing] == [4]
    harness.bring(request)
    harness.start(request, expected_output(PROMPT, 1))
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


@pytest.mark.parametrize("caching", [True, False])
def test_a_swapped_request_goes_on_where_it_was(make_engine: HarnessFactory, caching: bool) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=20, preemption="swap", enable_prefix_caching=caching)
    first, second = two_that_do_not_fit(harness)
    assert harness.engine.stats().host.held > 0
    harness.run()
    for request in (first, second):
        assert harness.outputs[request.request_id] == harness.expected(request)
    assert harness.model.num_tokens == 2 * (6 + 19)  # each token once, however often they were preempted
    stats = harness.engine.stats()
    assert stats.swaps == stats.preemptions > 0
    assert stats.host.held == 0


def test_without_room_in_host_memory_a_preempted_request_computes_again(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=1, preemption="swap", enable_prefix_caching=False)
    first, second = two_that_do_not_fit(harness)
    harness.run()
    assert all(harness.outputs[r.request_id] == harness.expected(r) for r in (first, second))
    assert harness.engine.stats().swaps == 0
    assert harness.model.num_tokens > 2 * (6 + 19)


def test_a_request_is_not_parked_unless_so_set(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=20)
    two_that_do_not_fit(harness)
    assert harness.engine.stats().host.held == 0
    harness.run()


@pytest.mark.parametrize("caching", [True, False])
def test_cancel_of_a_swapped_request_frees_its_host_copy(make_engine: HarnessFactory, caching: bool) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=20, preemption="swap", enable_prefix_caching=caching)
    first, second = two_that_do_not_fit(harness)
    assert second.status is RequestStatus.WAITING
    assert harness.engine.stats().host.held > 0
    harness.engine.cancel(second.request_id)
    stats = harness.engine.stats().host
    assert stats.held == 0
    assert stats.cached == (0 if not caching else stats.total - stats.free)
    harness.run()
    assert harness.outputs[first.request_id] == harness.expected(first)


def test_a_fault_while_a_request_is_swapped_leaves_no_host_copy(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=20, preemption="swap")
    two_that_do_not_fit(harness)
    harness.engine.fail_all(RuntimeError("boom"))
    assert harness.engine.stats().host.held == 0
    assert not harness.engine.has_work()


def test_a_swapped_request_takes_what_is_still_in_the_pool(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8, num_host_blocks=20, preemption="swap")
    first, second = two_that_do_not_fit(harness)
    restored = harness.engine.stats().host.restored
    num_computed = (len(second.token_ids) - 1) // 4
    harness.engine.cancel(first.request_id)
    harness.step()
    assert second.status is RequestStatus.RUNNING
    assert harness.engine.stats().host.restored - restored < num_computed + 1
    harness.run()
    assert harness.outputs[second.request_id] == harness.expected(second)


def test_resetting_the_prefix_cache_empties_host_memory_too(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=9, num_host_blocks=20)
    run_alone(harness, PROMPT)
    run_alone(harness, OTHER)
    assert harness.engine.reset_prefix_cache()
    assert harness.engine.stats().host.bytes_used == 0
    assert run_alone(harness, PROMPT).num_cached_tokens == 0
