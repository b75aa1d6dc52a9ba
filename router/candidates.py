"""Workers that can do one part of a request, with columns of what that costs; a decision goes through few of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from router.costs import WorkerCosts
from router.prefix_index import MAX_SLOTS, Match

TIE_MS, TIE_SHARE = 1.0, 0.05
"""Prices this close are equal: estimates are no better, and equal prompts should meet at the same worker."""
MAX_HOLDER_SETS = 1024
"""That are remembered as positions: many prompts begin with what the same workers hold."""


def tied(best_ms: float) -> float:
    """The highest price that is as good as the best one."""
    return best_ms + max(0.0, best_ms) * TIE_SHARE + TIE_MS


class _Column:
    """Numbers with the extreme one among them known."""

    def __init__(self, values: Iterable[float], extreme_of: Callable[[Iterable[float]], float]) -> None:
        self.values = list(values)
        self._extreme_of = extreme_of
        self.extreme = extreme_of(self.values) if self.values else 0.0

    def set(self, position: int, value: float) -> None:
        before = self.values[position]
        if value == before:
            return
        self.values[position] = value
        if before == self.extreme:
            self.extreme = self._extreme_of(self.values)
        else:
            self.extreme = self._extreme_of((self.extreme, value))


class Candidates:
    """Their *ranks*: the price of the part, less what a worker may cost more because it holds some of the prompt."""

    def __init__(
        self,
        members: Sequence[WorkerCosts],
        costs: Callable[[WorkerCosts], tuple[float, float, float]],
        worth_ms: float = 0.0,
    ) -> None:
        """`costs` are those of every request, of each token of its prompt, and what is less for each that is held."""
        self.members = list(members)
        self.costs = costs
        self.worth_ms = worth_ms
        """What holding a token may make a worker cost more. One for all: a slow worker is worth no more than others."""
        columns = list(zip(*map(costs, members), strict=True)) or [(), (), ()]
        self._base_ms, self._token_ms = _Column(columns[0], min), _Column(columns[1], min)
        self._held_ms = _Column(columns[2], max)
        self._rooms = _Column((member.room for member in members), min)
        self._slots = [_slot(member) for member in members]
        self._position = {member.worker_id: i for i, member in enumerate(members)}
        self._holders: dict[int, list[int]] = {}
        """Of a set of slots: the positions of those members that are in it."""

    def replace(self, member: WorkerCosts) -> None:
        """New costs of a worker that is among them."""
        i = self._position[member.worker_id]
        self.members[i] = member
        base_ms, token_ms, held_ms = self.costs(member)
        self._base_ms.set(i, base_ms)
        self._token_ms.set(i, token_ms)
        self._held_ms.set(i, held_ms)
        self._rooms.set(i, member.room)
        slot = _slot(member)
        if self._slots[i] != slot:
            self._slots[i] = slot
            self._holders.clear()

    def held(self, matches: Sequence[Match], num_tokens: int) -> list[int]:
        """Tokens of the prompt at each worker. The last token is computed in any case."""
        held = [0] * len(self.members)
        for num_blocks, slots in matches:
            tokens = min(num_blocks * self.members[0].worker.block_size, num_tokens - 1)
            for i in self._holders_of(slots):
                held[i] = tokens
        return held

    def ranks(self, num_tokens: int, held: Sequence[int], total_tokens: int = 0) -> list[float]:
        """`total_tokens`: that need blocks."""
        bases, token_ms, held_ms = self._base_ms.values, self._token_ms.values, self._held_ms.values
        ranks = [base + num_tokens * token for base, token in zip(bases, token_ms, strict=True)]
        for i, tokens in enumerate(held):
            if tokens:
                ranks[i] -= tokens * held_ms[i]
        if total_tokens > self._rooms.extreme:
            ranks = [rank + member.blocks_ms(total_tokens) for rank, member in zip(ranks, self.members, strict=True)]
        return ranks

    def best(
        self, matches: Sequence[Match], num_tokens: int, held: Sequence[int], total_tokens: int
    ) -> list[tuple[float, int]]:
        """Ranks and positions of those as good as the best, by position. Workers that hold little of the prompt are
        passed over where none of them can be."""
        floor = self._base_ms.extreme + num_tokens * self._token_ms.extreme
        limit = floor
        ranked: dict[int, float] = {}
        if total_tokens <= self._rooms.extreme:
            bases, token_ms, held_ms = self._base_ms.values, self._token_ms.values, self._held_ms.values
            for _, slots in matches:
                holders = self._holders_of(slots)
                if not holders or (ranked and floor - held[holders[0]] * self._held_ms.extreme > limit):
                    continue
                for i in holders:
                    ranked[i] = bases[i] + num_tokens * token_ms[i] - held[i] * held_ms[i]
                limit = tied(min(ranked.values()))
        if limit >= floor:
            ranks = self.ranks(num_tokens, held, total_tokens)
            limit = tied(min(ranks))
            return [(rank, i) for i, rank in enumerate(ranks) if rank <= limit]
        return [(ranked[i], i) for i in sorted(ranked) if ranked[i] <= limit]

    def _holders_of(self, slots: int) -> Sequence[int]:
        holders = self._holders.get(slots)
        if holders is None:
            if len(self._holders) >= MAX_HOLDER_SETS:
                self._holders.clear()
            holders = self._holders[slots] = [i for i, slot in enumerate(self._slots) if slots >> slot & 1]
        return holders


def _slot(member: WorkerCosts) -> int:
    slot = member.worker.slot
    return MAX_SLOTS if slot is None else slot
