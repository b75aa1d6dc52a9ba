"""Moves blocks between the pool and the requests' block tables. Knows what a request needs, not whose turn it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from engine.adoption import Adoption, MissingBlock
from engine.block_hash import BlockIdentity, block_chain, extend_chain, pack_tokens
from engine.block_manager import BlockManager
from engine.block_names import BlockNames
from engine.block_table_checks import NO_BLOCK, check_tables
from engine.borrowing import BorrowingBlockManager, Loan
from engine.config import CacheConfig
from engine.errors import InternalError
from engine.host_tier import HostTier
from engine.request import Request, RequestKind, RequestStatus


@dataclass(slots=True)
class _Quarantine:
    """Blocks of a request that is gone, kept until none of `busy` is touched by a link."""

    blocks: list[int]  # in chain order
    busy: set[int]


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """Where the blocks of a request come from that is to be admitted."""

    request: Request
    cached: tuple[int, ...]
    """Resident blocks of its beginning."""
    num_new: int
    """Blocks to be allocated behind them."""
    num_computed_tokens: int
    """Tokens that have KV in these blocks once it is admitted."""
    restored: tuple[int, ...] = ()
    """Host slots whose contents go into the first of the new blocks."""
    num_released_blocks: int = 0
    """Blocks that the request had given back when it was preempted, before all others; then nothing is cached."""


class BlockTables:
    """The only writer of `Request.block_table`, `block_hashes`, `num_released_blocks` and `num_published_blocks`.

    Invariants, checked by `check_integrity`:
      1. A block has one reference for each table that it is in, and one for each quarantine.
      2. The first `num_published_blocks` of a table hold complete KV, never written again, and (prefix caching on)
         each is the one that is registered under its hash. With a sliding window it may have lost its hash: some
         block before it left the window, and was evicted.
      3. A block is leased exactly while a request waits for its KV.
      4. Requests that share a block have the same tokens from the first to the last that both have KV for in it. A
         block that is to be written and holds no KV yet is in one table only; one that holds some is written only
         once it is in no other (`grow`).

    By 2, whoever holds a published block holds the published blocks before it, as far as the window reaches; released
    together, deepest first, they leave a cache in which every resident block's ancestors are resident.
    """

    def __init__(
        self,
        config: CacheConfig,
        blocks: BlockManager,
        identity: BlockIdentity,
        host: HostTier | None = None,
        names: BlockNames | None = None,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._identity = identity
        self._host = host
        self._names = names or BlockNames()
        self._quarantines: list[_Quarantine] = []

    @property
    def block_size(self) -> int:
        return self._config.block_size

    def plan(self, request: Request) -> AdmissionPlan:
        """Blocks for all known tokens, and one more to grow into unless the request can never fill it."""
        cached = self._cached_prefix(request)
        num_blocks = min(
            self._config.blocks_for(len(request.token_ids)) + 1,
            self._config.blocks_for(request.max_kv_tokens),
        )
        parked = None if self._host is None else self._host.parked(request.request_id)
        if parked is not None and parked.num_computed_tokens > len(cached) * self.block_size:
            released = parked.num_released_blocks
            cached = cached if len(cached) > released else []
            start = max(released, len(cached))
            slots, num_computed = parked.slots[start - released :], parked.num_computed_tokens
            return AdmissionPlan(request, tuple(cached), num_blocks - start, num_computed, slots, start - len(cached))
        slots = tuple(self._cached_on_host(request, len(cached)))
        num_computed = (len(cached) + len(slots)) * self.block_size
        return AdmissionPlan(request, tuple(cached), num_blocks - len(cached), num_computed, slots)

    def hold(self, plan: AdmissionPlan) -> None:
        """Begin an admission: take hold of what is cached, before anything is allocated that could evict it."""
        self._blocks.acquire(plan.cached)
        plan.request.block_table = [NO_BLOCK] * plan.num_released_blocks + list(plan.cached)
        plan.request.num_released_blocks = plan.num_released_blocks
        if self._host is not None:
            self._host.hold(plan.restored)

    def fill(self, plan: AdmissionPlan) -> None:
        """End an admission: allocate the other blocks, and copy into them what is in host memory.

        If copying fails, the request has its blocks, and none of the new ones counts as computed.
        """
        request = plan.request
        num_held = len(request.block_table)
        request.block_table += self._blocks.allocate(plan.num_new)
        request.num_published_blocks = num_held
        if self._host is not None:
            for slot, block in zip(plan.restored, request.block_table[num_held:], strict=False):
                self._host.restore(slot, block)
            self._host.unpark(request.request_id)
        request.num_computed_tokens = plan.num_computed_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self.publish(request)

    def settle(self) -> None:
        """Until all copies between pool and host memory are done: before anybody else writes into a block."""
        if self._host is not None:
            self._host.settle()

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Let `child`, which has no blocks, begin with the parent's blocks of their first `num_tokens` tokens.

        Both have the same tokens there, and the parent has computed them. All blocks are shared, the last one too if
        it is partial: whoever is to write into it first gets a copy then. False, and nothing has changed, if the
        parent has given blocks back that the child needs, or the last one is a peer's: nobody may write behind its end.
        """
        released, num_full = parent.num_released_blocks, num_tokens // self._config.block_size
        ends_in_own = num_tokens % self._config.block_size == 0 or self._blocks.is_own(parent.block_table[num_full])
        if released > self._config.blocks_outside_window(num_tokens) or not ends_in_own:
            return False
        child.block_table = parent.block_table[: self._config.blocks_for(num_tokens)]
        self._blocks.acquire(child.block_table[released:])
        child.block_hashes = parent.block_hashes[:num_full]
        child.num_released_blocks = released
        child.num_published_blocks = min(parent.num_published_blocks, num_full)
        child.num_computed_tokens = num_tokens
        child.num_cached_tokens = min(num_tokens, child.num_prompt_tokens)
        return True

    def growth(self, request: Request) -> tuple[int, int | None]:
        """What `grow` has to do: how many blocks it takes, and the request's shared block that one is a copy of."""
        size, table = self._config.block_size, request.block_table
        count = -(-len(request.token_ids) // size) - len(table)
        i = request.num_computed_tokens // size
        if i >= len(table) or self._blocks.is_writable(table[i]):
            return max(0, count), None
        return max(0, count) + 1, table[i]

    def grow(self, request: Request) -> bool:
        """Make room for the KV of all known tokens, in blocks that nobody else reads.

        If the next token goes into a shared block, the request gets a copy of it. All or nothing: on False, request
        and pool are unchanged.
        """
        count, shared = self.growth(request)
        if count == 0:
            return True
        if not self._blocks.can_allocate(count):
            return False
        if shared is not None:
            i = request.num_computed_tokens // self._config.block_size
            request.block_table[i] = self._blocks.copy_on_write(shared)
            count -= 1
        request.block_table += self._blocks.allocate(count)
        return True

    def lacks_context(self, request: Request) -> bool:
        """Whether the next token looks back on blocks that never came."""
        return request.num_released_blocks > self._config.blocks_outside_window(request.num_computed_tokens)

    def room(self, request: Request) -> int:
        """Tokens that can be computed in the blocks that the request has; 0 if the next one goes into a shared one."""
        size, table = self._config.block_size, request.block_table
        i = request.num_computed_tokens // size
        if i < len(table) and not self._blocks.is_writable(table[i]):
            return 0
        return len(table) * size - request.num_computed_tokens

    def publish(self, request: Request) -> None:
        """Register the blocks that are full of computed KV, so that other requests find them, and give back those
        that left the sliding window.

        Where another block has the same content already, the request changes over to that one: it may be shared,
        ours becomes free.
        """
        num_full = request.num_computed_tokens // self._config.block_size
        if num_full > request.num_published_blocks and self._config.enable_prefix_caching:
            self._register_full_blocks(request, num_full)
        if self._config.sliding_window is not None:
            self._leave_window(request)

    def open_transfer(self, request: Request, adoption: Adoption) -> tuple[MissingBlock, ...]:
        """Lease every block of the reservation that is not resident, and say what belongs into each.

        But blocks outside the sliding window are given back instead: they do not come. Leases nothing and returns
        nothing if the transfer was given up before it began: the KV is missing all the same.
        """
        outside = 0 if adoption.given_up else self._config.blocks_outside_window(adoption.num_tokens - 1)
        first = max(request.num_published_blocks, outside)
        ordinals = range(first, self._config.blocks_for(adoption.num_tokens))
        adoption.expect(ordinals)
        if adoption.given_up:
            return ()
        if outside > request.num_published_blocks:
            self._release_to(request, first)
            request.num_published_blocks, request.num_computed_tokens = first, first * self._config.block_size
        hashes = self._reservation_hashes(request, adoption.num_tokens)
        slots = request.block_table
        self._blocks.lease([slots[i] for i in ordinals])
        return tuple(MissingBlock(i, slots[i], self._blocks.generation(slots[i]), hashes[i]) for i in ordinals)

    def close_transfer(self, request: Request, ordinals: Iterable[int]) -> None:
        """No link writes into these blocks of the request any more."""
        self._blocks.unlease([request.block_table[i] for i in ordinals])

    def borrow(self, request: Request, loan: Loan) -> None:
        """Hold what the request lacks of `loan`, and give the rest back.

        If the request holds a former content of one of the slots, that is lost: it will start over, and all go back.
        Raises `InternalError` if it has one of the blocks already; then all have gone back, and nothing has changed.
        """
        adoption = request.adoption
        missing = adoption.missing if adoption is not None and not adoption.given_up else ()
        wanted = [lent for lent in loan.blocks if lent.ordinal in missing]
        loan.give_back(len(loan.blocks) - len(wanted))
        if adoption is None or not wanted:
            return
        lent_ids = {loan.lender.first_block + lent.source: lent.generation for lent in wanted}
        held = lent_ids.keys() & {*request.block_table, *adoption.borrowed.values()}
        if len(lent_ids) < len(wanted) or any(self._blocks.generation(i) == lent_ids[i] for i in held):
            loan.give_back(len(wanted))
            raise InternalError(f"request {request.request_id} was lent a block twice")
        assert isinstance(self._blocks, BorrowingBlockManager), "nobody can lend to this pool"
        ordinals = [lent.ordinal for lent in wanted]
        self.close_transfer(request, ordinals)
        if held or adoption.first_lost is not None:
            loan.give_back(len(wanted))
            self._blocks.release(list(adoption.borrowed.values()))
            adoption.lose(ordinals)
            return
        for lent in wanted:
            adoption.borrowed[lent.ordinal] = self._blocks.borrow(loan, lent)
            adoption.adopt(lent.ordinal)

    def exchange(self, request: Request, adoption: Adoption) -> None:
        """Put borrowed blocks in the place of the request's own, up to the first gap. What is behind it waits, or goes
        back if the gap stays: then it is to be computed, and nobody computes into a borrowed block."""
        borrowed = adoption.borrowed
        for ordinal in [o for o in borrowed if not adoption.missing or o < adoption.first_missing]:
            own, request.block_table[ordinal] = request.block_table[ordinal], borrowed.pop(ordinal)
            self._blocks.release((own,))
        if adoption.given_up:
            self._blocks.release(list(borrowed.values()))
            borrowed.clear()

    def park(self, request: Request) -> bool:
        """Copy the KV of a request that is to be preempted to host memory, for its next admission.

        False, and nothing has changed, if there is no room for it, or a block of it is a peer's.
        """
        if self._host is None or not all(map(self._blocks.is_own, request.block_table)):
            return False
        released, published = request.num_released_blocks, request.num_published_blocks
        hashes: list[bytes | None] = (
            list(request.block_hashes[:published]) if self._config.enable_prefix_caching else []
        )
        num_blocks = self._config.blocks_for(request.num_computed_tokens)
        hashes += [None] * (num_blocks - len(hashes))
        blocks = list(zip(request.block_table[released:num_blocks], hashes[released:], strict=True))
        return self._host.park(request.request_id, blocks, request.num_computed_tokens, released)

    def free(self, request: Request, busy_slots: Collection[int] = ()) -> None:
        """Let go of the request's blocks. Those that a link may touch still stay in quarantine until `quiet`.

        With a busy block that is published the ones before it stay too, so that none is evicted before it.
        """
        adoption = request.adoption
        if adoption is not None and not adoption.given_up:
            self.close_transfer(request, adoption.missing)
            self._blocks.release(list(adoption.borrowed.values()))
            adoption.borrowed.clear()
        table = request.block_table[request.num_released_blocks :]
        num_published = request.num_published_blocks - request.num_released_blocks
        busy = set(busy_slots).intersection(table)
        prefix = max((i + 1 for i in range(num_published) if table[i] in busy), default=0)
        kept = [block for i, block in enumerate(table) if i < prefix or block in busy]
        self._blocks.release([block for i, block in enumerate(table) if i >= prefix and block not in busy])
        request.block_table = []
        request.num_released_blocks = request.num_published_blocks = 0
        if kept:
            self._blocks.quarantine(kept)
            self._quarantines.append(_Quarantine(kept, busy))

    def quiet(self, slots: Iterable[int]) -> None:
        """Nothing touches these slots any more on behalf of one request that was freed with them busy.

        A slot may be busy for several such requests; each needs its own call. Slots that are not busy are ignored.
        """
        for slot in slots:
            for quarantine in self._quarantines:
                if slot in quarantine.busy:
                    quarantine.busy.remove(slot)
                    break
        for quarantine in self._quarantines:
            if not quarantine.busy:
                self._blocks.unquarantine(quarantine.blocks)
        self._quarantines = [quarantine for quarantine in self._quarantines if quarantine.busy]

    def num_withheld(self, request: Request) -> int:
        """Pinned blocks that the request cannot have: all but those that it begins with."""
        num_pinned = self._blocks.stats().pinned
        return num_pinned and num_pinned - sum(map(self._blocks.is_pinned, self._cached_prefix(request)))

    def pin(self, name: str, scope: bytes, token_ids: Sequence[int], max_blocks: int) -> int:
        """Keep what is resident of a prefix from eviction, in whole blocks. Returns how many tokens those hold.

        Raises `PinLimit` if more than `max_blocks`, or than may be, would be pinned; then nothing has changed.
        """
        size = self._config.block_size
        full = token_ids[: len(token_ids) // size * size]
        hashes = block_chain(self._identity.root(scope), pack_tokens(full), size)
        return self._blocks.pin(name, hashes, max_blocks) * size

    def check_integrity(self, requests: Collection[Request]) -> None:
        """`requests`: all that hold blocks, or wait for them."""
        self._blocks.check_integrity()
        if self._host is not None:
            self._host.check_integrity({r.request_id for r in requests if r.status is RequestStatus.WAITING})
        assert all(quarantine.busy for quarantine in self._quarantines), "a quarantine without a busy block"
        quarantined = [block for quarantine in self._quarantines for block in quarantine.blocks]
        check_tables(self._config, self._blocks, requests, quarantined)

    def _register_full_blocks(self, request: Request, num_full: int) -> None:
        self._hash_full_blocks(request)
        hashes, names = request.block_hashes, self._names.of(request, self._config.block_size)
        for i in range(request.num_published_blocks, num_full):
            own = request.block_table[i]
            first = self._blocks.register(own, hashes[i], hashes[i - 1] if i else None, names[i])
            if first != own:
                self._blocks.acquire([first])
                self._blocks.release([own])
                request.block_table[i] = first
            request.num_published_blocks = i + 1

    def _leave_window(self, request: Request) -> None:
        """Give back what no later token of the request looks at; with prefix caching others may still find it."""
        if request.kind is RequestKind.PREFILL and not request.transfer_over:
            return  # a link is still to read them
        end = self._config.blocks_outside_window(request.num_computed_tokens)
        if end > request.num_released_blocks:
            self._release_to(request, end)

    def _release_to(self, request: Request, end: int) -> None:
        begin = request.num_released_blocks
        self._blocks.release(request.block_table[begin:end])
        request.block_table[begin:end] = [NO_BLOCK] * (end - begin)
        request.num_released_blocks = end

    def _cached_prefix(self, request: Request) -> list[int]:
        """Never the block of the last token: its logits are wanted, and a block that others share is not written."""
        if not self._config.enable_prefix_caching or request.needs_prompt_logits:
            return []
        self._hash_full_blocks(request)
        return self._blocks.lookup(request.block_hashes[: (len(request.token_ids) - 1) // self._config.block_size])

    def _cached_on_host(self, request: Request, num_resident: int) -> list[int]:
        """Host slots of what follows the resident prefix."""
        if self._host is None or not self._config.enable_prefix_caching or request.needs_prompt_logits:
            return []
        limit = (len(request.token_ids) - 1) // self._config.block_size
        return self._host.lookup(request.block_hashes[num_resident:limit])

    def _hash_full_blocks(self, request: Request) -> None:
        size, hashes = self._config.block_size, request.block_hashes
        for i in range(len(hashes), len(request.token_ids) // size):
            parent = self._identity.parent(request.scope, hashes, request.num_public_tokens)
            hashes.append(extend_chain(parent, pack_tokens(request.token_ids[i * size : (i + 1) * size])))

    def _reservation_hashes(self, request: Request, num_tokens: int) -> list[bytes]:
        """Of the blocks of the first `num_tokens` tokens; the last one may be partial, as it is at the sender."""
        self._hash_full_blocks(request)
        num_full = num_tokens // self._config.block_size
        hashes = request.block_hashes[:num_full]
        tail = request.token_ids[num_full * self._config.block_size : num_tokens]
        if tail:
            parent = self._identity.parent(request.scope, hashes, request.num_public_tokens)
            hashes.append(extend_chain(parent, pack_tokens(tail)))
        return hashes
