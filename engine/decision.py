"""The policy: from what waits, what runs and what is free to what the next step does. Changes nothing that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.batch import ScheduledSequence
from engine.block_ledger import BlockLedger
from engine.block_manager import BlockManager
from engine.block_tables import AdmissionPlan, BlockTables
from engine.config import SchedulerConfig
from engine.fair_share import Line
from engine.growth import GrowthPolicy, Stream
from engine.request import Request, RequestKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerState:
    """All that `decide` knows."""

    config: SchedulerConfig
    now: float
    """Engine clock: for ageing."""
    running: Collection[Request]
    awaiting_kv: Collection[Request]
    lines: Collection[Line]
    """Who waits."""
    served: Mapping[bytes, int]
    """Tokens served to each tenant that has a live request."""
    best_priority: int
    """Of all live requests."""
    tables: BlockTables
    pool: BlockManager
    growth: GrowthPolicy
    tokens_per_step: float
    """Tokens that prefill computes in the time that a step takes beside its tokens."""


@dataclass(frozen=True, slots=True)
class Admission:
    plan: AdmissionPlan
    level: int
    """Priority with which the request was chosen: its own, or a better one for its wait."""


@dataclass(frozen=True, slots=True)
class Decision:
    preempted: tuple[Request, ...] = ()
    """Give up their blocks, the last in precedence first, before anybody gets any."""
    growing: tuple[Request, ...] = ()
    """Get blocks for all known tokens, in this order."""
    admitted: tuple[Admission, ...] = ()
    """Take hold of their cached prefixes before anything is allocated; get their other blocks last."""
    sequences: tuple[ScheduledSequence, ...] = ()

    @property
    def gets_ahead(self) -> bool:
        """Whether another decision right after this one may find more to do."""
        return bool(self.preempted or self.sequences)


def decide(state: SchedulerState) -> Decision:
    """Blocks for those that run, then the token budget: decode, prompts, and whoever can be admitted."""
    ledger = BlockLedger(state.tables, state.pool)
    running = sorted(state.running, key=_precedence)
    preempted, stuck = _make_room(running, ledger)
    if preempted:
        running = [request for request in running if request not in preempted]
    batch = _Batch(state.config.max_num_batched_tokens)
    prompts: list[Request] = []
    for request in running:
        if request.num_uncomputed_tokens > 1:
            prompts.append(request)
        elif request not in stuck:
            batch.take(request, 1)
    for request in sorted(prompts, key=lambda r: (r.level, state.served[r.scope], r.queue_number)):
        batch.take(request, request.num_uncomputed_tokens, state.tables.room(request) if request in stuck else None)
    admitted = () if preempted or stuck else tuple(_admit(state, ledger, batch))
    growing = tuple(request for request in running if ledger.growth(request))
    return Decision(tuple(preempted), growing, admitted, tuple(batch.sequences))


def _precedence(request: Request) -> tuple[int, int]:
    """Who comes first keeps its blocks longest."""
    return request.level, request.queue_number


def _make_room(running: Sequence[Request], ledger: BlockLedger) -> tuple[list[Request], list[Request]]:
    """Plan growth for each, the first in precedence first, taking blocks from the last.

    Never from the first, so that something always gets ahead; nor from one whose blocks a link may be reading.
    Returns who gives way, and who can neither grow nor make anybody give way: it sits this step out, as links hold
    the rest.
    """
    staying = list(running)
    preempted: list[Request] = []
    stuck: list[Request] = []
    for request in running:
        while request not in preempted and not ledger.grow(request):
            victim = next((r for r in reversed(staying[1:]) if r.kind is not RequestKind.PREFILL), None)
            if victim is None:
                stuck.append(request)
                break
            staying.remove(victim)
            preempted.append(victim)
            ledger.give_up(victim)
    return preempted, stuck


def _admit(state: SchedulerState, ledger: BlockLedger, batch: _Batch) -> Iterator[Admission]:
    """Whoever is next, as long as that one fits and pays: nobody overtakes it."""
    live = [*state.running, *state.awaiting_kv]
    if len(live) >= state.config.max_num_seqs:
        return
    queue = _Queue(state)
    growth: _Growth | None = None
    while len(live) < state.config.max_num_seqs and (request := queue.first) is not None:
        if request.adoption is None and batch.budget == 0:
            break  # later it may find more of its prompt in the cache
        plan = state.tables.plan(request)
        num_left = ledger.num_allocatable - ledger.cost(plan)
        if num_left < 0:
            break
        growth = growth or _Growth(state, ledger, live)
        if not growth.allows(plan, num_left):
            break
        ledger.admit(plan)
        if request.adoption is None:
            batch.take(request, len(request.token_ids) - plan.num_computed_tokens)
        live.append(request)
        yield Admission(plan, queue.take(plan))


class _Growth:
    """What is asked of the growth policy: about those that run, and those admitted with this decision."""

    def __init__(self, state: SchedulerState, ledger: BlockLedger, live: Sequence[Request]) -> None:
        """`live`: admitted before this decision."""
        self._state = state
        self._block_size = size = state.tables.block_size
        self._streams = [
            self._stream(r, len(r.block_table) + ledger.growth(r), r.num_cached_tokens // size)
            for r in live
            if r.kind is not RequestKind.PREFILL
        ]

    def allows(self, plan: AdmissionPlan, num_free: int) -> bool:
        """Whether it is worth while to admit a request too, which leaves `num_free` blocks. Then count it in.

        One that only computes its prompt does not grow, and is never preempted: it needs to fit, no more.
        """
        if plan.request.kind is RequestKind.PREFILL:
            return True
        num_shared = len(plan.cached)
        added = self._stream(plan.request, num_shared + plan.num_new, num_shared)
        growth, tokens_per_step = self._state.growth, self._state.tokens_per_step
        if self._streams and not growth.allows(self._streams, added, num_free, tokens_per_step):
            return False
        self._streams.append(added)
        return True

    def _stream(self, request: Request, num_blocks: int, num_shared: int) -> Stream:
        num_tokens = len(request.token_ids) - num_shared * self._block_size
        return Stream(num_tokens, num_blocks - num_shared, self._state.growth.tokens_to_come(request))


class _Queue:
    """Waiting requests in the order in which they are to be admitted, as the admissions of this decision change it."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._charges: Counter[bytes] = Counter()
        """Tokens that admissions of this decision will be charged for."""
        self._clock = (state.now, state.config.priority_step_s)
        self._cursors = [cursor for cursor in map(_Cursor, state.lines) if cursor.first is not None]

    @property
    def first(self) -> Request | None:
        cursor = min(self._cursors, key=self._order, default=None)
        return None if cursor is None else cursor.first

    def take(self, plan: AdmissionPlan) -> int:
        """Go on behind `first`, for which `plan` is. Returns the level at which it was first."""
        cursor = min(self._cursors, key=self._order)
        level, _, _ = self._order(cursor)
        self._charges[plan.request.scope] += len(plan.request.token_ids) - plan.num_computed_tokens
        cursor.advance()
        if cursor.first is None:
            self._cursors.remove(cursor)
        return level

    def _order(self, cursor: _Cursor) -> tuple[int, int, int]:
        """Level, then tokens served to the tenant, then age."""
        request = cursor.first
        assert request is not None, "a cursor at its end is dropped"
        level = request.priority if cursor.had_turn else cursor.line.level(request, *self._clock)
        served = self._state.served[request.scope] + self._charges[request.scope]
        return max(level, self._state.best_priority), served, request.queue_number


class _Cursor:
    """A place in a line."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.had_turn = False
        self._rest = (request for request in line.requests if not request.draws_along)
        self.first = next(self._rest, None)

    def advance(self) -> None:
        self.had_turn = True
        self.first = next(self._rest, None)


class _Batch:
    """The step's sequences, as long as the token budget lasts."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.sequences: list[ScheduledSequence] = []

    def take(self, request: Request, num_uncomputed: int, room: int | None = None) -> None:
        """As many of the request's uncomputed tokens as budget and `room` allow."""
        count = min(num_uncomputed, self.budget, num_uncomputed if room is None else room)
        if count > 0:
            self.budget -= count
            self.sequences.append(ScheduledSequence(request, count, count == num_uncomputed))
