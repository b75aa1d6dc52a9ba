from __future__ import annotations

from collections.abc import Iterator

import pytest
from factories import fake_identity, make_request

from engine.adoption import Adoption
from engine.block_hash import block_chain, pack_tokens
from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import CacheConfig
from engine.request import Request, RequestKind

NUM_BLOCKS = 12


class Tables:
    """Block tables with their pool and the requests that hold blocks."""

    def __init__(self, *, caching: bool = True) -> None:
        config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=4, enable_prefix_caching=caching)
        self.pool = BlockManager(config)
        self.tables = BlockTables(config, self.pool, fake_identity())
        self.holding: list[Request] = []

    def admit(self, prompt: list[int], max_tokens: int = 8, kind: RequestKind = RequestKind.LOCAL) -> Request:
        request = make_request(prompt, max_tokens=max_tokens, kind=kind)
        assert self.tables.admit(request)
        self.holding.append(request)
        return request

    def compute(self, request: Request) -> None:
        request.num_computed_tokens = len(request.token_ids)
        self.tables.publish(request)

    def free(self, request: Request, busy: list[int] | None = None) -> None:
        self.tables.free(request, busy or [])
        self.holding.remove(request)

    def check(self) -> None:
        self.tables.check_integrity(self.holding)


@pytest.fixture
def tables() -> Iterator[Tables]:
    tables = Tables()
    yield tables
    tables.check()


PROMPT = list(range(10))  # 2 full blocks and a half


def test_admission_gives_room_for_the_prompt_and_a_block_to_grow(tables: Tables) -> None:
    assert len(tables.admit(PROMPT).block_table) == 4


def test_admission_gives_no_growth_block_to_a_request_that_cannot_fill_it(tables: Tables) -> None:
    assert len(tables.admit(PROMPT, max_tokens=3).block_table) == 3  # 12 tokens with KV
    assert len(tables.admit(PROMPT, max_tokens=4).block_table) == 4
    assert len(tables.admit(PROMPT, kind=RequestKind.PREFILL).block_table) == 3


def test_a_failed_admission_changes_nothing(tables: Tables) -> None:
    done = tables.admit(PROMPT)
    tables.compute(done)
    tables.free(done)
    tables.admit(list(range(100, 128)))  # 8 of 12 blocks; 2 of the others are cached
    before = tables.pool.stats()
    request = make_request(PROMPT + list(range(50, 60)))  # 2 cached, 4 more of which 2 are free
    assert not tables.tables.admit(request)
    assert tables.pool.stats() == before
    assert request.block_table == []
    assert request.num_computed_tokens == 0


def test_a_cached_prefix_is_shared_and_counts_as_computed(tables: Tables) -> None:
    first = tables.admit(PROMPT)
    tables.compute(first)
    second = tables.admit(PROMPT)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.num_computed_tokens == second.num_cached_tokens == 8


def test_the_block_of_the_last_token_is_never_taken_from_the_cache(tables: Tables) -> None:
    first = tables.admit(PROMPT[:8])
    tables.compute(first)
    assert tables.admit(PROMPT[:8]).num_cached_tokens == 4


def test_another_scope_finds_nothing(tables: Tables) -> None:
    tables.compute(tables.admit(PROMPT))
    other = make_request(PROMPT, scope=b"other")
    assert tables.tables.admit(other)
    tables.holding.append(other)
    assert other.num_cached_tokens == 0


def test_without_prefix_caching_nothing_is_kept() -> None:
    tables = Tables(caching=False)
    done = tables.admit(PROMPT)
    tables.compute(done)
    tables.free(done)
    assert tables.pool.stats().free == NUM_BLOCKS
    assert tables.admit(PROMPT).num_cached_tokens == 0
    tables.check()


def test_whoever_computes_a_content_second_changes_over_to_the_first_block(tables: Tables) -> None:
    first, second = tables.admit(PROMPT), tables.admit(PROMPT)
    tables.compute(first)
    own = second.block_table[:2]
    tables.compute(second)
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]  # partial blocks are not shared
    assert all(tables.pool.references(block) == 0 for block in own)


def test_a_resident_block_has_resident_ancestors_although_its_writer_was_second(tables: Tables) -> None:
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


def test_growth_takes_one_block_when_the_next_token_needs_it(tables: Tables) -> None:
    request = tables.admit(PROMPT)
    request.token_ids += [1] * 6
    assert tables.tables.grow(request)
    assert len(request.block_table) == 4
    request.token_ids.append(1)
    assert tables.tables.grow(request)
    assert len(request.block_table) == 5


def test_a_ticket_names_hash_slot_and_generation_of_every_missing_block(tables: Tables) -> None:
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


def test_busy_slots_stay_in_quarantine_until_they_are_quiet(tables: Tables) -> None:
    request = tables.admit(PROMPT, kind=RequestKind.DECODE)
    request.adoption = Adoption(num_tokens=len(PROMPT))
    tables.tables.open_transfer(request, request.adoption)
    busy = request.block_table[1]
    tables.free(request, [busy])
    assert (tables.pool.stats().quarantined, tables.pool.stats().free) == (1, NUM_BLOCKS - 1)
    tables.tables.quiet([busy])
    assert tables.pool.stats().free == NUM_BLOCKS


def test_ancestors_of_a_published_busy_block_stay_with_it(tables: Tables) -> None:
    request = tables.admit(list(range(13)), kind=RequestKind.PREFILL)
    tables.compute(request)
    table = list(request.block_table)
    tables.free(request, [table[1]])
    assert tables.pool.stats().quarantined == 2
    assert tables.pool.lookup(request.block_hashes) == table[:3]
    tables.tables.quiet([table[1]])
    assert (tables.pool.stats().quarantined, tables.pool.stats().cached) == (0, 3)


def test_a_block_that_two_links_read_waits_for_both(tables: Tables) -> None:
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


def test_slots_that_are_not_busy_are_ignored(tables: Tables) -> None:
    request = tables.admit(PROMPT)
    tables.tables.quiet(request.block_table)
    tables.free(request, [11])
    assert tables.pool.stats().free == NUM_BLOCKS
