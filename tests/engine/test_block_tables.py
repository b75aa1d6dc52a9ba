from __future__ import annotations

from collections.abc import Iterator

import pytest
from factories import fake_identity, make_request
from table_model import TableModel

from engine.adoption import Adoption
from engine.block_hash import block_chain, pack_tokens
from engine.block_table_checks import NO_BLOCK
from engine.request import RequestKind

NUM_BLOCKS = 12


@pytest.fixture
def tables() -> Iterator[TableModel]:
    tables = TableModel()
    yield tables
    tables.check()


PROMPT = list(range(10))  # 2 full blocks and a half


def test_admission_gives_room_for_the_prompt_and_a_block_to_grow(tables: TableModel) -> None:
    assert len(tables.admit(PROMPT).block_table) == 4


def test_admission_gives_no_growth_block_to_a_request_that_cannot_fill_it(tables: TableModel) -> None:
    assert len(tables.admit(PROMPT, max_tokens=3).block_table) == 3  # 12 tokens with KV
    assert len(tables.admit(PROMPT, max_tokens=4).block_table) == 4
    assert len(tables.admit(PROMPT, kind=RequestKind.PREFILL).block_table) == 3


def test_a_plan_changes_nothing(tables: TableModel) -> None:
    done = tables.admit(PROMPT)
    tables.compute(done)
    tables.free(done)
    tables.admit(list(range(100, 128)))  # 8 of 12 blocks; 2 of the others are cached
    before = tables.pool.stats()
    request = make_request(PROMPT + list(range(50, 60)))  # 2 cached, 4 more of which 2 are free
    plan = tables.tables.plan(request)
    assert (len(plan.cached), plan.num_new, plan.num_computed_tokens) == (2, 4, 8)
    assert not tables.try_admit(request)
    assert tables.pool.stats() == before
    assert request.block_table == []
    assert request.num_computed_tokens == 0


def test_a_cached_prefix_is_shared_and_counts_as_computed(tables: TableModel) -> None:
    first = tables.admit(PROMPT)
    tables.compute(first)
    second = tables.admit(PROMPT)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_computed_tokens == second.num_cached_tokens == 8


def test_the_block_of_the_last_token_is_never_taken_from_the_cache(tables: TableModel) -> None:
    first = tables.admit(PROMPT[:8])
    tables.compute(first)
    assert tables.admit(PROMPT[:8]).num_cached_tokens == 4


def test_another_scope_finds_nothing(tables: TableModel) -> None:
    tables.compute(tables.admit(PROMPT))
    other = make_request(PROMPT, scope=b"other")
    assert tables.try_admit(other)
    assert other.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    tables = TableModel(caching=False)
    done = tables.admit(PROMPT)
    tables.compute(done)
    tables.free(done)
    assert tables.pool.stats().free == NUM_BLOCKS
    assert tables.admit(PROMPT).num_cached_tokens == 0
    tables.check()


def test_whoever_computes_a_content_second_changes_over_to_the_first_block(tables: TableModel) -> None:
    first, second = tables.admit(PROMPT), tables.admit(PROMPT)
    tables.compute(first)
    own = second.block_table[:2]
    tables.compute(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]  # partial blocks are not shared
    assert all(tables.pool.references(block) == 0 for block in own)


def test_a_resident_block_has_resident_ancestors_although_its_writer_was_second(tables: TableModel) -> None:
    """The writer of the deeper blocks found the first ones registered by another request, which ended before it."""
    first, second = tables.admit(PROMPT[:8]), tables.admit(list(range(20)))
    tables.compute(first)
    tables.compute(second)
    tables.free(first)
    tables.free(second)
    hashes = second.block_hashes
    for wanted in range(NUM_BLOCKS + 1):
        blocks = tables.pool.allocate(wanted)
        resident = [bool(tables.pool.lookup([content_hash])) for content_hash in hashes]
        assert resident == sorted(resident, reverse=True)
        tables.pool.release(blocks)


def test_growth_takes_one_block_when_the_next_token_needs_it(tables: TableModel) -> None:
    request = tables.admit(PROMPT)
    request.token_ids += [1] * 6
    assert tables.tables.grow(request)
    assert len(request.block_table) == 4
    request.token_ids.append(1)
    assert tables.tables.grow(request)
    assert len(request.block_table) == 5


def test_a_ticket_names_hash_slot_and_generation_of_every_missing_block(tables: TableModel) -> None:
    first = tables.admit(PROMPT[:5])
    tables.compute(first)
    request = tables.admit(PROMPT, kind=RequestKind.DECODE)
    request.adoption = Adoption(num_tokens=len(PROMPT))
    missing = tables.tables.open_transfer(request, request.adoption)
    hashes = block_chain(fake_identity().root(request.scope), pack_tokens(PROMPT), 4)
    assert [block.ordinal for block in missing] == [1, 2]
    assert [block.slot for block in missing] == request.block_table[1:3]
    assert [block.expected_hash for block in missing] == hashes[1:]  # the last one of a partial block
    assert [block.generation for block in missing] == [tables.pool.generation(block.slot) for block in missing]
    assert tables.pool.stats().leased == 2  # not the growth block


def test_busy_slots_stay_in_quarantine_until_they_are_quiet(tables: TableModel) -> None:
    request = tables.admit(PROMPT, kind=RequestKind.DECODE)
    request.adoption = Adoption(num_tokens=len(PROMPT))
    tables.tables.open_transfer(request, request.adoption)
    busy = request.block_table[1]
    tables.free(request, [busy])
    assert (tables.pool.stats().quarantined, tables.pool.stats().free) == (1, NUM_BLOCKS - 1)
    tables.tables.quiet([busy])
    assert tables.pool.stats().free == NUM_BLOCKS


def test_ancestors_of_a_published_busy_block_stay_with_it(tables: TableModel) -> None:
    request = tables.admit(list(range(13)), kind=RequestKind.PREFILL)
    tables.compute(request)
    table = list(request.block_table)
    tables.free(request, [table[1]])
    assert tables.pool.stats().quarantined == 2
    assert tables.pool.lookup(request.block_hashes) == table[:3]
    tables.tables.quiet([table[1]])
    assert (tables.pool.stats().quarantined, tables.pool.stats().cached) == (0, 3)


def test_a_block_that_two_links_read_waits_for_both(tables: TableModel) -> None:
    first = tables.admit(PROMPT, kind=RequestKind.PREFILL)
    tables.compute(first)
    second = tables.admit(PROMPT, kind=RequestKind.PREFILL)
    shared = first.block_table[0]
    tables.free(first, [shared])
    tables.free(second, [shared])
    tables.tables.quiet([shared])
    assert tables.pool.stats().quarantined == 1
    tables.tables.quiet([shared])
    assert tables.pool.stats().quarantined == 0


def test_slots_that_are_not_busy_are_ignored(tables: TableModel) -> None:
    request = tables.admit(PROMPT)
    tables.tables.quiet(request.block_table)
    tables.free(request, [11])
    assert tables.pool.stats().free == NUM_BLOCKS


def test_a_fork_shares_all_blocks_and_allocates_none(tables: TableModel) -> None:
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    before = tables.pool.stats().owned
    child = tables.fork(parent)
    assert child.block_table == parent.block_table[:3]  # not the parent's growth block
    assert (child.num_computed_tokens, child.num_published_blocks) == (10, 2)
    assert tables.pool.stats().owned == before
    assert tables.pool.stats().copies_avoided == 3


def test_the_first_writer_into_a_shared_block_gets_a_copy_and_the_last_does_not(tables: TableModel) -> None:
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    children = [tables.fork(parent), tables.fork(parent)]
    shared = parent.block_table[2]
    for i, request in enumerate([children[0], parent, children[1]]):
        tables.append(request, 50 + i)
        tables.check()
    assert [request.block_table[2] == shared for request in (children[0], parent, children[1])] == [False, False, True]
    assert tables.pool.stats().copies == 2


def test_a_shared_block_gives_no_room_before_it_was_copied(tables: TableModel) -> None:
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    child = tables.fork(parent)
    child.token_ids.append(5)
    assert tables.tables.room(child) == 0
    assert tables.tables.grow(child)
    assert tables.tables.room(child) == 2


def test_a_fork_at_a_block_boundary_needs_no_copy(tables: TableModel) -> None:
    parent = tables.admit(PROMPT[:8])
    tables.compute(parent)
    child = tables.fork(parent)
    tables.append(parent, 1)
    tables.append(child, 2)
    assert tables.pool.stats().copies == 0
    assert child.block_table[:2] == parent.block_table[:2]
    assert child.block_table[2] != parent.block_table[2]


def test_without_room_for_a_copy_growth_fails_and_changes_nothing(tables: TableModel) -> None:
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    child = tables.fork(parent)
    others = tables.pool.allocate(tables.pool.num_allocatable)
    before = tables.pool.stats()
    assert not tables.append(child, 1)
    assert tables.pool.stats() == before
    assert child.block_table == parent.block_table[:3]
    tables.pool.release(others)


@pytest.mark.parametrize("caching", [True, False])
def test_a_branch_in_the_middle_of_a_full_block_copies_it(caching: bool) -> None:
    tables = TableModel(caching=caching)
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    branch = tables.fork(parent, [*PROMPT[:6], 77, 78, 79], num_tokens=6)
    assert tables.tables.grow(branch)
    tables.compute(branch)
    tables.check()
    assert branch.block_table[0] == parent.block_table[0]
    assert branch.block_table[1] != parent.block_table[1]
    assert tables.pool.stats().copies == 1


def test_samples_that_draw_the_same_come_together_again(tables: TableModel) -> None:
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    child = tables.fork(parent)
    for request in (parent, child):
        tables.append(request, 1, 2)
    assert child.block_table[:3] == parent.block_table[:3]


def test_blocks_that_left_the_window_are_given_back_and_their_places_kept() -> None:
    tables = TableModel(sliding_window=6)
    request = tables.admit(PROMPT, max_tokens=20)
    tables.compute(request)  # position 10 looks back to 5: the first block is over
    assert request.block_table[0] == NO_BLOCK
    assert tables.pool.stats().owned == 3
    tables.append(request, *range(10))
    assert request.num_released_blocks == 3  # position 20 looks back to 15
    assert request.block_table[:3] == [NO_BLOCK] * 3
    assert tables.pool.stats().owned == 2
    tables.check()
    tables.free(request)
    assert tables.pool.stats().owned == 0
    tables.check()


@pytest.mark.parametrize(("window", "kept"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (100, 3)])
def test_no_block_is_given_back_that_the_next_token_looks_at(window: int, kept: int) -> None:
    tables = TableModel(sliding_window=window)
    request = tables.admit([*PROMPT, 10], max_tokens=1)
    tables.compute(request)
    assert sum(block != NO_BLOCK for block in request.block_table) == kept


def test_a_long_text_runs_in_a_pool_that_holds_its_window() -> None:
    tables = TableModel(num_blocks=4, sliding_window=8)
    request = tables.admit(PROMPT, max_tokens=400)
    tables.compute(request)
    assert tables.append(request, *range(100, 400))
    tables.check()


def test_what_left_the_window_is_found_by_others_until_it_is_evicted() -> None:
    tables = TableModel(sliding_window=4)
    tables.compute(tables.admit(PROMPT))
    second = tables.admit(PROMPT)
    assert second.num_cached_tokens == 8
    assert second.num_released_blocks == 1
    tables.check()


def test_blocks_whose_beginning_was_evicted_are_found_no_more_and_not_registered_again() -> None:
    tables = TableModel(sliding_window=4)
    first = tables.admit(PROMPT, max_tokens=20)
    tables.compute(first)
    tables.pool.release(tables.pool.allocate(tables.pool.num_allocatable))
    assert tables.pool.lookup(first.block_hashes) == []
    tables.append(first, *range(8))
    assert first.num_published_blocks == 4
    assert tables.pool.lookup(first.block_hashes) == []
    tables.check()


def test_a_link_finds_all_blocks_of_a_prompt_although_they_left_the_window() -> None:
    tables = TableModel(sliding_window=1)
    request = tables.admit(PROMPT, kind=RequestKind.PREFILL)
    tables.compute(request)
    assert NO_BLOCK not in request.block_table
    request.transfer_over = True
    tables.tables.publish(request)
    assert request.num_released_blocks == 2


def test_a_fork_shares_what_is_in_the_window() -> None:
    tables = TableModel(sliding_window=6)
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    child = tables.fork(parent)
    assert child.block_table == parent.block_table[:3]
    tables.append(child, 1)
    tables.check()


def test_a_branch_before_the_window_is_refused() -> None:
    tables = TableModel(sliding_window=4)
    parent = tables.admit(PROMPT)
    tables.compute(parent)
    branch = make_request([*PROMPT[:5], 77])
    assert not tables.tables.fork(parent, branch, 5)
    assert branch.block_table == []
    tables.check()


def test_a_pin_takes_whole_blocks_of_a_scope(tables: TableModel) -> None:
    tables.compute(tables.admit(PROMPT))
    assert tables.tables.pin("system", b"tenant", PROMPT, max_blocks=12) == 8
    assert tables.tables.pin("system", b"other", PROMPT, max_blocks=12) == 0
    assert tables.pool.stats().pinned == 0
