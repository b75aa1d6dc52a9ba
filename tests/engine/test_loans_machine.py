"""A pool that lends and a pool that borrows, against a model that knows what each slot really holds."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.borrowing import BorrowingBlockManager, LentBlock, Loan
from engine.config import CacheConfig
from engine.errors import NoFreeBlocks
from engine.lending import LendingBlockManager

LENDING, BORROWING, MAX_LENT, FIRST = 8, 6, 5, 50


class Link:
    """The borrower's view of the lender, and what it has given back that the lender does not know."""

    first_block = FIRST

    def __init__(self, generations: npt.NDArray[np.uint64]) -> None:
        self.generations = generations
        self.returned: Counter[str] = Counter()

    def give_back(self, ticket_id: str, number: int) -> None:
        self.returned[ticket_id] += number


class Loans(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(LENDING, dtype=np.uint64)
        self.lender = LendingBlockManager(
            CacheConfig(num_blocks=LENDING, block_size=4),
            generations=self.generations,
            fence=lambda: None,
            max_lent=MAX_LENT,
        )
        self.borrower = BorrowingBlockManager(CacheConfig(num_blocks=BORROWING, block_size=4), fence=lambda: None)
        self.link = Link(self.generations)
        self.names = count()
        self.contents: dict[int, bytes] = {}
        """Slot of the lender -> what is in it."""
        self.prompts: dict[str, list[int]] = {}
        """Held at the lender."""
        self.outstanding: Counter[str] = Counter()
        """What the lender still expects back, by loan."""
        self.tables: list[list[int]] = []
        """Held at the borrower."""
        self.lent_as: dict[int, set[bytes]] = defaultdict(set)
        """Borrowed id -> contents that it was lent for and that its holders want."""

    @rule(length=st.integers(1, 4))
    def compute(self, length: int) -> None:
        try:
            blocks = self.lender.allocate(length)
        except NoFreeBlocks:
            assert length > self.lender.num_allocatable
            return
        name = f"p{next(self.names)}"
        self.prompts[name] = blocks
        for i, block in enumerate(blocks):
            self.contents[block] = b"%s %d" % (name.encode(), i)
            self.lender.register(block, self.contents[block], self.contents[blocks[i - 1]] if i else None)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def end_prompt(self, data: st.DataObject) -> None:
        self.lender.release(self.prompts.pop(data.draw(st.sampled_from(sorted(self.prompts)))))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        blocks = self.prompts[name]
        first = data.draw(st.integers(0, len(blocks) - 1))
        before = self.lender.stats()
        key = f"{name}.{next(self.names)}"
        if not self.lender.lend(key, blocks, len(blocks) - first):
            assert before.lent + len(blocks) > MAX_LENT, "refused below the limit"
            assert self.lender.stats() == before
            return
        self.outstanding[key] = len(blocks) - first
        lent = tuple(LentBlock(i, blocks[i], self.lender.generation(blocks[i])) for i in range(first, len(blocks)))
        loan = Loan(key, self.link, lent)
        table = [self.borrower.borrow(loan, block) for block in lent]
        self.tables.append(table)
        for block, (_, source, _) in zip(table, lent, strict=True):
            self.lent_as[block].add(self.contents[source])
            self.borrower.register(block, self.contents[source], None)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.borrower.acquire(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.borrower.release(table)
        held = {block for other in self.tables for block in other}
        for block in set(table) - held:
            self.lent_as.pop(block, None)

    @rule()
    def hear_what_came_back(self) -> None:
        for key, number in self.link.returned.items():
            if self.outstanding[key]:  # else the link has ended meanwhile
                self.lender.end_loan(key, number)
                self.outstanding[key] -= number
        self.link.returned.clear()

    @rule()
    def lose_the_link(self) -> None:
        """The borrower goes on as if nothing had happened."""
        for key, number in (+self.outstanding).items():
            self.lender.end_loan(key, number)
        self.outstanding.clear()

    @invariant()
    def what_is_not_lost_is_what_was_lent(self) -> None:
        lost = set(self.borrower.find_lost())
        for block, wanted in self.lent_as.items():
            if block not in lost:
                assert wanted == {self.contents[block - FIRST]}

    @invariant()
    def what_is_found_is_what_is_looked_for(self) -> None:
        self.borrower.find_lost()
        for content in self.contents.values():
            for block in self.borrower.lookup([content]):
                assert self.contents[block - FIRST] == content

    @invariant()
    def nothing_is_counted_twice_or_forgotten(self) -> None:
        holders = Counter(block for blocks in self.prompts.values() for block in blocks)
        self.lender.check_integrity()
        self.lender.check_holders(holders)
        self.borrower.check_integrity()
        self.borrower.check_holders(Counter(block for table in self.tables for block in table))
        stats = self.lender.stats()
        assert stats.free + stats.cached + stats.owned == LENDING
        assert stats.owned == len(holders), "lent blocks keep others waiting"
        assert self.lender.num_allocatable == LENDING - len(holders)


Loans.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLoans = Loans.TestCase
pytestmark = pytest.mark.timeout(120)
