from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.errors import InternalError
from engine.host_tier import HostStats, HostTier, ParkedKv

NUM_BLOCKS = 6
NUM_SLOTS = 4
BLOCK_BYTES = 1000


class SlowMover:
    """A pool and host memory that are lists of contents, with copies that are done when they are waited for."""

    def __init__(self) -> None:
        self.pool = [b"" for _ in range(NUM_BLOCKS)]
        self.host = [b"" for _ in range(NUM_SLOTS)]
        self.pending: list[tuple[str, int, int]] = []

    def to_host(self, block: int, slot: int) -> None:
        self.pending.append(("out", block, slot))

    def to_pool(self, slot: int, block: int) -> None:
        self.pending.append(("in", block, slot))

    def wait(self) -> None:
        for way, block, slot in self.pending:
            if way == "out":
                self.host[slot] = self.pool[block]
            else:
                self.pool[block] = self.host[slot]
        self.pending.clear()


class Tier:
    def __init__(self) -> None:
        self.mover = SlowMover()
        self.tier = HostTier(NUM_SLOTS, BLOCK_BYTES, self.mover)
        self.waiting: set[str] = set()

    def store(self, *hashes: bytes) -> None:
        """Evict blocks with these contents, in this order."""
        for content_hash in hashes:
            self.mover.wait()
            self.mover.pool[0] = content_hash
            self.tier.store(0, content_hash)

    def park(self, request_id: str, blocks: list[tuple[int, bytes | None]], num_tokens: int = 7) -> bool:
        parked = self.tier.park(request_id, blocks, num_tokens, 0)
        if parked:
            self.waiting.add(request_id)
        return parked

    def restored(self, *hashes: bytes) -> list[bytes]:
        """Contents that come back for these hashes."""
        slots = self.tier.lookup(hashes)
        self.tier.hold(slots)
        for block, slot in enumerate(slots, start=1):
            self.tier.restore(slot, block)
        self.tier.settle()
        return self.mover.pool[1 : 1 + len(slots)]


@pytest.fixture
def tier() -> Iterator[Tier]:
    tier = Tier()
    yield tier
    tier.tier.settle()
    tier.tier.check_integrity(tier.waiting)


def test_an_evicted_block_comes_back_by_its_hash(tier: Tier) -> None:
    tier.store(b"b", b"a")
    tier.tier.settle()
    assert tier.restored(b"a", b"b", b"c") == [b"a", b"b"]
    assert tier.tier.stats() == HostStats(
        free=2, cached=2, held=0, total=4, bytes_used=2000, stored=2, restored=2, evictions=0
    )


def test_lookup_stops_at_the_first_gap(tier: Tier) -> None:
    tier.store(b"c", b"a")
    assert len(tier.tier.lookup([b"a", b"b", b"c"])) == 1


def test_the_least_recently_used_is_given_up(tier: Tier) -> None:
    tier.store(b"a", b"b", b"c", b"d")
    tier.tier.settle()
    tier.restored(b"a")
    tier.store(b"e")
    assert [len(tier.tier.lookup([h])) for h in (b"a", b"b", b"c")] == [1, 0, 1]


def test_a_block_that_is_here_already_is_not_copied_again(tier: Tier) -> None:
    tier.store(b"a", b"b", b"c", b"d")
    tier.tier.settle()
    tier.store(b"a", b"e")
    assert tier.tier.stats().stored == 5
    assert len(tier.tier.lookup([b"a"])) == 1
    assert tier.tier.lookup([b"b"]) == []


def test_what_is_to_be_copied_back_is_not_given_up_for_what_comes_out(tier: Tier) -> None:
    tier.store(b"a", b"b", b"c", b"d")
    tier.tier.settle()
    slots = tier.tier.lookup([b"a", b"b"])
    tier.tier.hold(slots)
    tier.store(b"e", b"f", b"g")
    tier.tier.restore(slots[0], 3)
    tier.tier.restore(slots[1], 4)
    tier.tier.settle()
    assert tier.mover.pool[3:5] == [b"a", b"b"]


def test_a_copy_in_flight_pins_its_slot(tier: Tier) -> None:
    tier.store(b"a", b"b", b"c", b"d")
    assert tier.tier.stats().held == 4
    tier.tier.settle()
    assert tier.tier.stats().cached == 4


def test_only_what_is_held_can_be_restored(tier: Tier) -> None:
    tier.store(b"a")
    tier.tier.settle()
    with pytest.raises(InternalError, match="hold it first"):
        tier.tier.restore(0, 1)
    assert tier.tier.stats().restored == 0


def test_parked_blocks_stay_whatever_is_stored(tier: Tier) -> None:
    tier.mover.pool[:2] = [b"full", b"partial"]
    assert tier.park("r", [(0, b"full"), (1, None)])
    tier.tier.settle()
    tier.store(b"1", b"2", b"3", b"4")
    parked = tier.tier.parked("r")
    assert parked is not None
    assert [tier.mover.host[slot] for slot in parked.slots] == [b"full", b"partial"]
    assert (parked.num_computed_tokens, parked.num_released_blocks) == (7, 0)


def test_a_parked_full_block_is_found_by_others_and_a_partial_one_is_not(tier: Tier) -> None:
    tier.park("r", [(0, b"full"), (1, None)])
    assert len(tier.tier.lookup([b"full"])) == 1
    tier.tier.settle()
    tier.tier.unpark("r")
    stats = tier.tier.stats()
    assert (stats.cached, stats.free) == (1, 3)


def test_parking_needs_room_for_all_or_changes_nothing(tier: Tier) -> None:
    assert tier.park("first", [(0, None), (1, None), (2, b"a")])
    tier.tier.settle()
    before = tier.tier.stats()
    assert not tier.park("second", [(3, b"b"), (4, None)])
    assert tier.tier.stats() == before
    assert tier.tier.parked("second") is None


def test_requests_that_are_parked_with_the_same_block_share_a_slot(tier: Tier) -> None:
    assert tier.park("first", [(0, b"a"), (1, b"b"), (2, None)])
    assert tier.park("second", [(0, b"a"), (1, b"b"), (3, None)])
    tier.tier.settle()
    assert tier.tier.stats().held == 4
    tier.tier.unpark("first")
    assert tier.tier.stats().held == 3


def test_cached_slots_that_a_request_needs_are_not_taken_for_its_other_blocks(tier: Tier) -> None:
    tier.store(b"a", b"b", b"c", b"d")
    tier.tier.settle()
    tier.mover.pool[1] = b"tail"
    assert tier.park("r", [(5, b"a"), (1, None)])
    tier.tier.settle()
    parked = tier.tier.parked("r")
    assert parked is not None
    assert [tier.mover.host[slot] for slot in parked.slots] == [b"a", b"tail"]


def test_clear_forgets_all_but_what_is_parked(tier: Tier) -> None:
    tier.store(b"x")
    tier.park("r", [(0, b"a"), (1, None)])
    tier.tier.settle()
    tier.tier.clear()
    assert tier.tier.lookup([b"x"]) == tier.tier.lookup([b"a"]) == []
    assert tier.tier.stats().held == 2
    tier.tier.unpark("r")
    assert tier.tier.stats().free == NUM_SLOTS


class AgainstContents(RuleBasedStateMachine):
    """Whatever happens, a hash gives back its content, and a parked request its blocks."""

    @initialize()
    def build(self) -> None:
        self.mover = SlowMover()
        self.tier = HostTier(NUM_SLOTS, BLOCK_BYTES, self.mover)
        self.parked: dict[str, list[bytes]] = {}

    def write(self, block: int, content: bytes) -> None:
        """The pool writes a block only in the order of the copies."""
        self.mover.wait()
        self.mover.pool[block] = content

    @rule(name=st.sampled_from("abcdefgh"))
    def store(self, name: str) -> None:
        self.write(0, name.encode())
        self.tier.store(0, name.encode())

    @rule(names=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), between=st.booleans())
    def restore(self, names: list[str], between: bool) -> None:
        hashes = [name.encode() for name in names]
        slots = self.tier.lookup(hashes)
        self.tier.hold(slots)
        if between:
            self.store("z")
        for block, slot in enumerate(slots, start=1):
            self.tier.restore(slot, block)
        self.mover.wait()
        assert self.mover.pool[1 : 1 + len(slots)] == hashes[: len(slots)]

    @rule(
        request_id=st.sampled_from("xy"),
        names=st.lists(st.sampled_from("abcdefgh"), max_size=3, unique=True),
        partial=st.booleans(),
    )
    def park(self, request_id: str, names: list[str], partial: bool) -> None:
        if request_id in self.parked:
            return
        contents = [name.encode() for name in names]
        blocks: list[tuple[int, bytes | None]] = [(i, content) for i, content in enumerate(contents)]
        if partial:
            contents.append(b"tail of " + request_id.encode())
            blocks.append((len(names), None))
        for block, content in enumerate(contents):
            self.write(block, content)
        before = self.tier.stats()
        if self.tier.park(request_id, blocks, 5, 0):
            self.parked[request_id] = contents
        else:
            assert self.tier.stats() == before

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.parked)))
        parked = self.tier.parked(request_id)
        assert isinstance(parked, ParkedKv)
        self.mover.wait()
        assert [self.mover.host[slot] for slot in parked.slots] == self.parked.pop(request_id)
        self.tier.unpark(request_id)

    @rule()
    def settle(self) -> None:
        self.tier.settle()
        assert not self.mover.pending

    @rule()
    def clear(self) -> None:
        self.tier.clear()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.tier.check_integrity(self.parked)
        stats = self.tier.stats()
        assert stats.free + stats.cached + stats.held == NUM_SLOTS
        assert stats.bytes_used <= NUM_SLOTS * BLOCK_BYTES


AgainstContents.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAgainstContents = AgainstContents.TestCase
