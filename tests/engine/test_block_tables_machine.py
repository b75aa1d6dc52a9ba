"""Block tables driven in any order, over a memory that remembers who wrote what.

The model is what must hold whatever happened: every request reads what it or an equal request has written; a link reads
what was there when it began, and writes where nobody reads; each block is in one state; and a follower of the events
knows what is resident.
"""

from __future__ import annotations

from block_follower import BlockFollower
from factories import make_request
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from table_model import Kv, TableModel

from engine.adoption import Adoption
from engine.errors import PinLimit
from engine.request import Request, RequestKind

NUM_BLOCKS = 10
SIZE = 4
PREFIX = [0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1]
prompts = st.builds(
    lambda length, tokens: PREFIX[:length] + tokens,
    st.sampled_from([0, 4, 6, 8, 12]),
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
)
GARBAGE: Kv = (-1,)


class Tables(RuleBasedStateMachine):
    @initialize(
        caching=st.sampled_from([True, True, False]),
        window=st.sampled_from([None, None, 1, 6]),
        come=st.lists(prompts, max_size=2),
    )
    def build(self, caching: bool, window: int | None, come: list[list[int]]) -> None:
        self.model = TableModel(
            num_blocks=NUM_BLOCKS, block_size=SIZE, caching=caching, sliding_window=window, max_pinned_share=0.4
        )
        self.writing: list[set[int]] = []
        """For each cancelled reservation the slots that a link still writes into."""
        self.reading: list[dict[int, list[Kv]]] = []
        """For each cancelled prefill the blocks that a link still reads, and what it must find."""
        self.follower = BlockFollower()
        for request in map(make_request, come):
            if self.model.try_admit(request):  # two long ones that share nothing do not fit
                self.model.compute(request)

    def computing(self) -> list[Request]:
        return [request for request in self.model.holding if request.adoption is None]

    def parents(self) -> list[Request]:
        return [request for request in self.computing() if request.num_computed_tokens > 0]

    def receiving(self) -> list[tuple[Request, Adoption]]:
        return [(request, request.adoption) for request in self.model.holding if request.adoption]

    # Requests come.

    @precondition(lambda self: len(self.model.holding) < 5)
    @rule(prompt=prompts, prefill=st.booleans(), computed=st.booleans())
    def admit(self, prompt: list[int], prefill: bool, computed: bool) -> None:
        before = self.model.pool.stats()
        request = make_request(prompt, kind=RequestKind.PREFILL if prefill else RequestKind.LOCAL)
        if not self.model.try_admit(request):
            assert self.model.pool.stats() == before
        elif computed:
            self.model.compute(request)

    @precondition(lambda self: len(self.model.holding) < 5)
    @rule(prompt=prompts)
    def reserve(self, prompt: list[int]) -> None:
        request = make_request(prompt, kind=RequestKind.DECODE)
        if self.model.try_admit(request):
            request.adoption = Adoption(num_tokens=len(request.token_ids))
            missing = self.model.tables.open_transfer(request, request.adoption)
            assert {block.ordinal for block in missing} == request.adoption.missing

    @precondition(lambda self: self.parents())
    @rule(
        data=st.data(), short_by=st.sampled_from([0, 0, 0, 1, 2, 3, 5]), tokens=st.lists(st.integers(0, 1), max_size=3)
    )
    def fork(self, data: st.DataObject, short_by: int, tokens: list[int]) -> None:
        parent = data.draw(st.sampled_from(self.parents()))
        num_tokens = parent.num_computed_tokens - short_by
        before = self.model.pool.stats().owned
        child = make_request([*parent.token_ids[:num_tokens], *tokens]) if num_tokens > 0 else None
        if child and self.model.tables.fork(parent, child, num_tokens):
            self.model.holding.append(child)
        assert self.model.pool.stats().owned == before, "sharing takes no block"
        for request in (child, parent) if child in self.model.holding else ():
            if data.draw(st.booleans()):
                self.advance_by(request, [1])

    # They compute.

    @precondition(lambda self: self.computing())
    @rule(data=st.data(), count=st.integers(1, 6))
    def advance(self, data: st.DataObject, count: int) -> None:
        """Compute so many known tokens, or if all have KV draw some and compute them."""
        request = data.draw(st.sampled_from(self.computing()))
        self.advance_by(request, data.draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))

    def advance_by(self, request: Request, tokens: list[int]) -> None:
        if request.num_uncomputed_tokens == 0:
            self.model.append(request, *tokens)
            return
        before = self.model.pool.stats(), list(request.block_table)
        if not self.model.tables.grow(request):
            assert (self.model.pool.stats(), request.block_table) == before
        self.model.compute(request, min(len(tokens), request.num_uncomputed_tokens, self.model.tables.room(request)))

    # KV arrives, or does not.

    @precondition(lambda self: self.receiving())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        request, adoption = data.draw(st.sampled_from(self.receiving()))
        if adoption.missing:
            ordinal = data.draw(st.sampled_from(sorted(adoption.missing)))
            for position in range(ordinal * SIZE, min((ordinal + 1) * SIZE, adoption.num_tokens)):
                self.model.write(request, position)
            self.model.tables.close_transfer(request, [ordinal])
            adoption.adopt(ordinal)
        self.take_stock(request, adoption)

    @precondition(lambda self: self.receiving())
    @rule(data=st.data())
    def give_up_transfer(self, data: st.DataObject) -> None:
        request, adoption = data.draw(st.sampled_from(self.receiving()))
        self.model.tables.close_transfer(request, adoption.missing)
        adoption.given_up = True
        self.take_stock(request, adoption)

    def take_stock(self, request: Request, adoption: Adoption) -> None:
        request.num_computed_tokens = min(adoption.resident_tokens(SIZE), len(request.token_ids) - 1)
        self.model.tables.publish(request)
        if adoption.given_up or not adoption.missing:
            request.adoption = None
            if self.model.tables.lacks_context(request):
                self.model.free(request)  # to start over

    # They go, and links let go later.

    @precondition(lambda self: self.model.holding)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.model.holding))
        busy: set[int] = set()
        if request.adoption is not None:
            slots = [request.block_table[ordinal] for ordinal in sorted(request.adoption.missing)]
            busy = {slot for slot in slots if data.draw(st.booleans())}
            self.writing += [busy] if busy else []
        elif request.kind is RequestKind.PREFILL:
            num_complete = request.num_computed_tokens // SIZE
            busy = {block for block in request.block_table[:num_complete] if data.draw(st.booleans())}
            self.reading += [{block: list(self.model.memory[block]) for block in busy}] if busy else []
        self.model.free(request, sorted(busy))

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def writes_end(self, data: st.DataObject) -> None:
        self.model.tables.quiet(self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1))))

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def reads_end(self, data: st.DataObject) -> None:
        self.model.tables.quiet(self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1))))

    # Operators and followers.

    @precondition(lambda self: self.model.pool.num_allocatable)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Somebody takes blocks for a moment."""
        stats = self.model.pool.stats()
        most = self.model.pool.num_allocatable
        self.model.pool.release(self.model.pool.allocate(data.draw(st.integers(min(stats.free + 1, most), most))))

    @precondition(lambda self: self.model.pool.stats().cached)
    @rule(name=st.sampled_from("xy"), length=st.sampled_from([4, 8, 12]), max_blocks=st.integers(1, NUM_BLOCKS))
    def pin(self, name: str, length: int, max_blocks: int) -> None:
        before = self.model.pool.stats().pinned
        try:
            pinned = self.model.tables.pin(name, b"tenant", PREFIX[:length], max_blocks)
        except PinLimit:
            assert self.model.pool.stats().pinned == before
        else:
            assert pinned <= length
            assert self.model.pool.stats().pinned * SIZE >= pinned

    @precondition(lambda self: self.model.pool.stats().pinned)
    @rule(name=st.sampled_from("xy"))
    def unpin(self, name: str) -> None:
        self.model.pool.unpin(name)

    @precondition(lambda self: len(self.model.holding) < 2 and self.model.pool.stats().cached)
    @rule()
    def reset(self) -> None:
        holding = any(r.num_released_blocks < len(r.block_table) for r in self.model.holding)  # behind a window: none
        idle = not (holding or self.writing or self.reading)
        assert self.model.pool.reset_prefix_cache() == idle
        assert not idle or self.model.pool.stats().free == NUM_BLOCKS

    @rule()
    def follow(self) -> None:
        self.follower.apply(self.model.pool.take_events())
        if self.follower.needs_snapshot:
            self.follower.restart(self.model.pool.snapshot())
        assert set(self.follower.resident) == set(self.model.pool.snapshot().hashes)

    @invariant()
    def links_write_where_nobody_reads(self) -> None:
        for slots in self.writing:
            for slot in slots:
                self.model.memory[slot] = [GARBAGE] * SIZE
        for request, adoption in self.receiving():
            for ordinal in adoption.missing:
                self.model.memory[request.block_table[ordinal]] = [GARBAGE] * SIZE
        self.model.check()

    @invariant()
    def links_read_what_was_there(self) -> None:
        for blocks in self.reading:
            for block, contents in blocks.items():
                assert self.model.memory[block] == contents, f"block {block} changed while a link read it"

    @invariant()
    def each_block_is_in_one_state(self) -> None:
        tables = [r.block_table[r.num_released_blocks :] for r in self.model.holding]
        held = {block for table in tables for block in table}
        leased = {request.block_table[i] for request, adoption in self.receiving() for i in adoption.missing}
        stats = self.model.pool.stats()
        assert stats.owned == len(held - leased)
        assert stats.leased == len(leased)
        assert stats.copies_avoided == sum(map(len, tables)) - len(held)
        busy = {block for blocks in (*self.writing, *self.reading) for block in blocks}
        assert stats.quarantined >= len(busy - held)
        assert stats.free + stats.cached + stats.owned + stats.leased + stats.quarantined == NUM_BLOCKS

    def teardown(self) -> None:
        """Nothing is lost: once all have gone every block is free or cached."""
        for request in list(self.model.holding):
            self.model.free(request)
        for blocks in (*self.writing, *self.reading):
            self.model.tables.quiet(blocks)
        stats = self.model.pool.stats()
        assert stats.free + stats.cached == NUM_BLOCKS
        self.model.check()


Tables.TestCase.settings = settings(
    max_examples=250, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestNobodyReadsAnothersKv = Tables.TestCase
