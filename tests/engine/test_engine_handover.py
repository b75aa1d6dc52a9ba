"""DECODE requests: KV that arrives, arrives in part, or does not arrive."""

from __future__ import annotations

import pytest
from factories import EngineHarness, HarnessFactory, fake_identity, kv_of, make_request
from fakes import expected_output

from engine.block_hash import block_chain, pack_tokens
from engine.errors import InternalError, RequestError
from engine.request import Request, RequestKind, RequestStatus

PROMPT = list(range(30, 44))  # 3 full blocks and a half
WHOLE_BLOCKS = list(range(30, 42))
FIRST = expected_output(PROMPT, 1)


def reserve(harness: EngineHarness, prompt: list[int] = PROMPT, max_tokens: int = 8) -> Request:
    request = harness.reserve(make_request(prompt, kind=RequestKind.DECODE, max_tokens=max_tokens))
    harness.step()
    return request


@pytest.fixture
def harness(make_engine: HarnessFactory) -> EngineHarness:
    return make_engine(num_blocks=24)


def test_a_reservation_is_granted_with_every_block_that_is_missing(harness: EngineHarness) -> None:
    request = reserve(harness)
    grant = harness.grants[request.request_id]
    assert grant.cached_tokens == 0
    assert [block.ordinal for block in grant.missing] == [0, 1, 2, 3]
    assert request.status is RequestStatus.AWAITING_KV
    stats = harness.engine.stats().blocks
    assert (stats.leased, stats.owned) == (4, 1)
    harness.engine.cancel(request.request_id)


def test_decode_continues_from_kv_that_arrived_and_computes_none_of_the_prompt(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request)
    harness.start(request, FIRST)
    before = harness.model.num_tokens
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)
    assert harness.model.num_tokens - before == 7  # each token once, but the last
    assert request.num_recomputed_tokens == 0


def test_the_order_of_blocks_and_start_does_not_matter(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request, [3, 1])
    harness.start(request, FIRST)
    harness.run()
    assert request.status is RequestStatus.AWAITING_KV
    harness.bring(request, [0])
    harness.bring(request, [2])
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


def test_no_token_is_drawn_before_the_router_started_the_request(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request)
    harness.run()
    assert harness.outputs[request.request_id] == []
    harness.engine.cancel(request.request_id)


def test_adopted_blocks_are_found_by_the_next_request(harness: EngineHarness) -> None:
    first = reserve(harness)
    harness.bring(first)
    second = reserve(harness, [*PROMPT, 1, 2])
    grant = harness.grants[second.request_id]
    assert grant.cached_tokens == 12
    assert [block.ordinal for block in grant.missing] == [3]
    for request in (first, second):
        harness.engine.cancel(request.request_id)


def test_a_block_after_a_gap_is_not_found_by_others(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request, [1, 2])
    assert harness.engine.stats().blocks.leased == 2
    other = harness.submit(make_request(PROMPT))
    harness.run()
    assert other.num_cached_tokens == 0
    assert harness.outputs[other.request_id] == expected_output(PROMPT, 8)
    harness.engine.cancel(request.request_id)


def test_two_requests_with_one_prompt_end_up_on_the_same_blocks(harness: EngineHarness) -> None:
    first, second = reserve(harness), reserve(harness)
    harness.bring(first)
    harness.bring(second)
    assert first.block_table[:3] == second.block_table[:3]
    for request in (first, second):
        harness.start(request, FIRST)
    harness.run()
    assert all(harness.outputs[r.request_id] == expected_output(PROMPT, 8) for r in (first, second))


@pytest.mark.parametrize("prompt", [PROMPT, WHOLE_BLOCKS])
@pytest.mark.parametrize(("arrived", "kept"), [([], 0), ([0], 1), ([0, 2], 1), ([1, 2], 0), ([0, 1], 2)])
@pytest.mark.parametrize("first_token_came", [True, False])
def test_what_did_not_arrive_is_computed_here(
    harness: EngineHarness, prompt: list[int], arrived: list[int], kept: int, first_token_came: bool
) -> None:
    request = reserve(harness, prompt)
    harness.bring(request, arrived)
    harness.engine.give_up_transfer(request.request_id)
    harness.run()
    assert request.status is RequestStatus.AWAITING_KV  # the router has not said yet which tokens it emitted
    harness.start(request, expected_output(prompt, 1) if first_token_came else [])
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(prompt, 8)
    assert request.num_recomputed_tokens == len(prompt) - 4 * kept


@pytest.mark.parametrize("prompt", [PROMPT, WHOLE_BLOCKS])
def test_if_only_the_first_token_is_lost_only_the_last_of_the_prompt_is_recomputed(
    harness: EngineHarness, prompt: list[int]
) -> None:
    request = reserve(harness, prompt)
    harness.bring(request)
    harness.engine.give_up_transfer(request.request_id)
    harness.start(request, [])
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(prompt, 8)
    assert request.num_recomputed_tokens == 1


def test_a_start_without_a_token_runs_once_all_blocks_arrived(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.start(request, [])
    harness.bring(request)
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


def test_a_transfer_given_up_before_the_grant_is_never_opened(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8)
    running = harness.submit(make_request(list(range(100, 116)), max_tokens=5))
    harness.step()
    request = reserve(harness)
    harness.start(request, [])
    harness.engine.give_up_transfer(request.request_id)
    assert request.status is RequestStatus.WAITING
    harness.run()
    assert harness.grants[request.request_id].missing == ()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)
    assert request.num_recomputed_tokens == len(PROMPT)
    assert harness.outputs[running.request_id] == harness.expected(running)


def test_late_and_repeated_calls_change_nothing(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request, [0])
    harness.engine.adopted(request.request_id, 0)
    harness.engine.adopted(request.request_id, 4)  # the growth block was never missing
    harness.engine.give_up_transfer(request.request_id)
    harness.engine.give_up_transfer(request.request_id)
    harness.engine.adopted(request.request_id, 1)
    harness.start(request, FIRST)
    harness.engine.start(request.request_id, FIRST)
    harness.step()
    harness.engine.give_up_transfer(request.request_id)
    harness.engine.adopted(request.request_id, 2)
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


@pytest.mark.parametrize("token_ids", [[512], expected_output(PROMPT, 8)])
def test_a_start_that_cannot_be_right_is_refused_and_changes_nothing(
    harness: EngineHarness, token_ids: list[int]
) -> None:
    request = reserve(harness)
    harness.bring(request)
    with pytest.raises(RequestError):
        harness.engine.start(request.request_id, token_ids)
    harness.start(request, FIRST)
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 8)


def test_a_request_resumed_after_many_tokens_adopts_their_kv_as_well(harness: EngineHarness) -> None:
    """A second decode worker takes over: the chain covers prompt and output."""
    output = expected_output(PROMPT, 5)
    request = harness.reserve(make_request(PROMPT, output=output, kind=RequestKind.DECODE, max_tokens=12))
    harness.step()
    tokens = [*PROMPT, *output]
    chain = block_chain(fake_identity().root(request.scope), pack_tokens(tokens), 4)
    assert [block.expected_hash for block in harness.grants[request.request_id].missing] == chain
    harness.bring(request)
    harness.start(request, expected_output(PROMPT, 6)[5:])
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(PROMPT, 12)


def test_cancel_frees_all_but_the_slots_that_a_link_still_writes(harness: EngineHarness) -> None:
    request = reserve(harness)
    harness.bring(request, [0])
    busy = [block.slot for block in harness.grants[request.request_id].missing][1:3]
    harness.engine.cancel(request.request_id, busy)
    stats = harness.engine.stats().blocks
    assert (stats.quarantined, stats.cached, stats.free) == (2, 1, 21)
    harness.engine.quiet(busy)
    stats = harness.engine.stats().blocks
    assert (stats.quarantined, stats.cached, stats.free) == (0, 1, 23)


def test_a_late_write_into_a_cancelled_slot_harms_nobody(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8)
    request = reserve(harness)
    slots = [block.slot for block in harness.grants[request.request_id].missing]
    harness.engine.cancel(request.request_id, slots)
    others = [harness.submit(make_request([i, 1, 2], max_tokens=6)) for i in range(4)]
    while harness.engine.has_work():
        harness.step()
        for slot in slots:
            harness.kv.block(slot)[:] = b"\x77" * harness.kv.layout.block_bytes
    assert all(harness.outputs[r.request_id] == harness.expected(r) for r in others)
    harness.engine.quiet(slots)
    assert harness.engine.stats().blocks.quarantined == 0


def test_blocks_that_a_link_reads_keep_their_content_until_they_are_quiet(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=8)
    request = harness.submit(make_request(PROMPT, kind=RequestKind.PREFILL))
    harness.run()
    table, contents = list(request.block_table), kv_of(PROMPT)
    harness.engine.cancel(request.request_id, table)
    others = [harness.submit(make_request([i, 1, 2], max_tokens=8)) for i in range(4)]
    harness.run()
    assert all(harness.outputs[r.request_id] == harness.expected(r) for r in others)
    for block, content in zip(table[:3], contents, strict=False):
        assert bytes(harness.kv.block(block)) == content
    harness.engine.quiet(table)
    assert harness.engine.stats().blocks.quarantined == 0


def test_a_general_fault_ends_all_but_held_requests_and_leaves_leased_slots_alone(harness: EngineHarness) -> None:
    held = harness.submit(make_request(PROMPT, kind=RequestKind.PREFILL))
    harness.run()
    reserved = reserve(harness, list(range(60, 70)))
    waiting = harness.submit(make_request([1, 2]))
    output = harness.engine.fail_all(ValueError("a bug"))
    assert {update.request_id for update in output.updates} == {reserved.request_id, waiting.request_id}
    assert all(isinstance(update.error, InternalError) for update in output.updates)
    assert harness.engine.stats().blocks.leased == 3
    harness.engine.check_integrity()
    harness.bring(reserved)  # the link does not know yet
    harness.run()
    harness.engine.cancel(reserved.request_id)
    harness.engine.release_held(held.request_id)
    stats = harness.engine.stats().blocks
    assert stats.free + stats.cached == stats.total
