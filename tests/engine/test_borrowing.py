from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from factories import fake_identity, make_request

from engine.borrowing import BorrowingBlockManager, LentBlock, Loan
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import InternalError
from engine.request import Request, RequestKind, RequestStatus
from engine.scheduler import Scheduler

NUM_BLOCKS = 8
FIRST = 100


class Peer:
    """A lender of 16 blocks, whose block 0 has the id 100 here."""

    first_block = FIRST

    def __init__(self) -> None:
        self.generations = np.ones(16, dtype=np.uint64)
        self.returned: Counter[str] = Counter()

    def give_back(self, ticket_id: str, count: int) -> None:
        self.returned[ticket_id] += count


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def pool() -> BorrowingBlockManager:
    config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=4)
    return BorrowingBlockManager(config, fence=lambda: None)


def borrow(pool: BorrowingBlockManager, peer: Peer, *sources: int, ticket: str = "t") -> list[int]:
    blocks = tuple(LentBlock(i, source, int(peer.generations[source])) for i, source in enumerate(sources))
    loan = Loan(ticket, peer, blocks)
    return [pool.borrow(loan, block) for block in blocks]


def name(i: int) -> bytes:
    return b"hash %d" % i


def test_borrowed_blocks_take_none_of_ours(pool: BorrowingBlockManager, peer: Peer) -> None:
    blocks = borrow(pool, peer, 3, 5)

    stats = pool.stats()
    assert blocks == [FIRST + 3, FIRST + 5]
    assert (stats.free, stats.borrowed, pool.num_allocatable) == (NUM_BLOCKS, 2, NUM_BLOCKS)
    pool.check_integrity()


def test_with_the_last_holder_a_borrowed_block_goes_back(pool: BorrowingBlockManager, peer: Peer) -> None:
    blocks = borrow(pool, peer, 3, 5)
    pool.acquire(blocks[:1])
    pool.release(blocks)
    assert peer.returned == {"t": 1}

    pool.release(blocks[:1])

    assert peer.returned == {"t": 2}
    assert pool.references(blocks[0]) == 0
    pool.check_integrity()


def test_a_block_that_came_twice_goes_back_twice(pool: BorrowingBlockManager, peer: Peer) -> None:
    (block,) = borrow(pool, peer, 3, ticket="t")
    assert borrow(pool, peer, 3, ticket="u") == [block]
    pool.release([block])
    assert not peer.returned

    pool.release([block])

    assert peer.returned == {"t": 1, "u": 1}


def test_what_is_borrowed_is_found_by_content_while_it_is_held(pool: BorrowingBlockManager, peer: Peer) -> None:
    blocks = borrow(pool, peer, 3, 5)
    for i, block in enumerate(blocks):
        assert pool.register(block, name(i), name(i - 1) if i else None) == block
    assert pool.lookup([name(0), name(1), name(2)]) == blocks

    pool.release(blocks)

    assert pool.lookup([name(0)]) == []


def test_followers_are_told_neither_of_borrowed_blocks_nor_of_what_follows_them(
    pool: BorrowingBlockManager, peer: Peer
) -> None:
    (borrowed,), (own,) = borrow(pool, peer, 3), pool.allocate(1)
    pool.register(borrowed, name(0), None)
    pool.register(own, name(1), name(0))

    assert not pool.take_events().events
    assert not pool.is_registered(own)


def test_a_content_that_is_ours_already_is_not_registered_as_borrowed(pool: BorrowingBlockManager, peer: Peer) -> None:
    (own,) = pool.allocate(1)
    pool.register(own, name(0), None)
    (borrowed,) = borrow(pool, peer, 3)

    assert pool.register(borrowed, name(0), None) == own
    pool.check_integrity()


def test_a_content_that_is_borrowed_already_is_not_registered_as_ours(pool: BorrowingBlockManager, peer: Peer) -> None:
    (borrowed,) = borrow(pool, peer, 3)
    pool.register(borrowed, name(0), None)
    (own,) = pool.allocate(1)

    assert pool.register(own, name(0), None) == borrowed
    pool.check_integrity()


def test_a_block_whose_generation_changed_is_lost_and_found_no_more(pool: BorrowingBlockManager, peer: Peer) -> None:
    blocks = borrow(pool, peer, 3, 5)
    for i, block in enumerate(blocks):
        pool.register(block, name(i), name(i - 1) if i else None)
    assert not pool.find_lost()
    peer.generations[5] += 1

    assert set(pool.find_lost()) == {blocks[1]}

    assert pool.lookup([name(0), name(1)]) == blocks[:1]
    assert pool.stats().borrowed_lost == 1
    pool.check_integrity()


def test_a_lost_block_is_never_registered(pool: BorrowingBlockManager, peer: Peer) -> None:
    (block,) = borrow(pool, peer, 3)
    peer.generations[3] += 1
    pool.find_lost()

    assert pool.register(block, name(0), None) == block
    assert pool.lookup([name(0)]) == []


def test_a_slot_that_is_lent_again_does_not_excuse_its_former_content(pool: BorrowingBlockManager, peer: Peer) -> None:
    (block,) = borrow(pool, peer, 3)
    pool.register(block, name(0), None)
    peer.generations[3] += 1

    assert borrow(pool, peer, 3, ticket="u") == [block]

    assert set(pool.find_lost()) == {block}
    assert pool.lookup([name(0)]) == []
    pool.release([block])
    pool.release([block])
    assert borrow(pool, peer, 3) == [block]
    assert not pool.find_lost()


def test_nobody_writes_into_a_borrowed_block(pool: BorrowingBlockManager, peer: Peer) -> None:
    (block,) = borrow(pool, peer, 3)

    assert not pool.is_writable(block)
    with pytest.raises(InternalError, match="is borrowed"):
        pool.copy_on_write(block)


def test_a_borrowed_block_is_not_pinned(pool: BorrowingBlockManager, peer: Peer) -> None:
    (block,) = borrow(pool, peer, 3)
    pool.register(block, name(0), None)

    assert pool.pin("p", [name(0)]) == 0


def test_quarantine_keeps_borrowed_blocks_until_it_ends(pool: BorrowingBlockManager, peer: Peer) -> None:
    (borrowed,), (own,) = borrow(pool, peer, 3), pool.allocate(1)
    pool.quarantine([borrowed, own])
    assert pool.stats().quarantined == 1

    pool.unquarantine([borrowed, own])

    assert (pool.stats().free, pool.stats().borrowed, peer.returned) == (NUM_BLOCKS, 0, {"t": 1})


def test_a_block_that_is_neither_ours_nor_borrowed_is_refused(pool: BorrowingBlockManager, peer: Peer) -> None:
    with pytest.raises(InternalError):
        pool.acquire([FIRST + 3])
    borrow(pool, peer, 5)
    with pytest.raises(InternalError, match="neither ours nor borrowed"):
        pool.release([FIRST + 3])


PREFIX = list(range(10, 18))


class Requests:
    """`first` runs, and reads the slots 3 and 5 of the peer; `second`, whose prompt goes on differently, shares them
    and waits for its blocks 2, 3 and 4."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        config = CacheConfig(num_blocks=16, block_size=4)
        self.pool = BorrowingBlockManager(config, fence=lambda: None)
        self.scheduler = Scheduler(SchedulerConfig(), config, self.pool, fake_identity(4), max_model_len=64)
        self.first = self.reserve([*PREFIX, 1])
        self.lend(self.first, {0: 3, 1: 5})
        self.scheduler.adopt(self.first, 2)
        self.scheduler.start(self.first)
        self.second = self.reserve([*PREFIX, *range(30, 39)])

    def reserve(self, prompt: list[int]) -> Request:
        request = make_request(prompt, kind=RequestKind.DECODE)
        self.scheduler.add(request)
        self.scheduler.schedule(0.0)
        return request

    def lend(self, request: Request, sources: dict[int, int]) -> None:
        blocks = tuple(LentBlock(i, source, int(self.peer.generations[source])) for i, source in sources.items())
        self.scheduler.borrow(request, Loan(request.request_id, self.peer, blocks))
        self.scheduler.check_integrity()


@pytest.fixture
def requests(peer: Peer) -> Requests:
    return Requests(peer)


@pytest.mark.parametrize("loans", [[{2: 3, 3: 7}], [{3: 7}, {2: 3}], [{2: 3}, {3: 7}], [{3: 3}, {2: 7}]])
def test_a_request_that_is_lent_a_slot_again_whose_former_content_it_holds_starts_over(
    requests: Requests, peer: Peer, loans: list[dict[int, int]]
) -> None:
    second, scheduler = requests.second, requests.scheduler
    assert second.block_table[:2] == [FIRST + 3, FIRST + 5]
    peer.generations[3] += 1

    for loan in loans:
        requests.lend(second, loan)
    assert peer.returned[second.request_id] == 2
    scheduler.adopt(second, 4)
    scheduler.start(second)
    scheduler.check_integrity()
    assert second.num_computed_tokens <= 12
    scheduler.take_back(requests.pool.find_lost())

    assert second.status is RequestStatus.WAITING
    assert requests.pool.stats().borrowed == 0
    scheduler.check_integrity()


def test_a_request_that_is_lent_what_it_holds_already_is_a_fault(requests: Requests, peer: Peer) -> None:
    with pytest.raises(InternalError, match="lent a block twice"):
        requests.lend(requests.second, {2: 3})

    assert peer.returned == {requests.second.request_id: 1}
    requests.scheduler.check_integrity()
