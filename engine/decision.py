"""The policy: from what waits, what runs and what is free to what the next step does. Changes nothing that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engine.batch import ScheduledSequence
from engine.block_ledger import BlockLedger
from engine.block_manager import BlockManager
from engine.block_tables import AdmissionPlan, BlockTables
from engine.config import SchedulerConfig
from engine.fair_share import Line
from engine.growth import GrowthPolicy, Stream
from engine.request import Request, RequestKind

_Order = tuple[int, int, int]
"""Level, then tokens served to the tenant, then age: the smallest goes first."""


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
    """Of all that wait or run."""
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
    door = _Door(state, ledger, batch, closed=bool(preempted or stuck))
    for order, request in sorted((door.order_of(request), request) for request in prompts):
        while door.is_before(order):
            door.admit()
        batch.take(request, request.num_uncomputed_tokens, state.tables.room(request) if request in stuck else None)
    while door.is_open:
        door.admit()
    growing = tuple(request for request in running if ledger.growth(request))
    return Decision(tuple(preempted), growing, tuple(door.admitted), tuple(batch.sequences))


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


class _Door:
    """Admits whoever is next, as long as that one fits and pays: nobody overtakes it."""

    def __init__(self, state: SchedulerState, ledger: BlockLedger, batch: _Batch, *, closed: bool) -> None:
        self.admitted: list[Admission] = []
        self._state = state
        self._ledger = ledger
        self._batch = batch
        self._live = [*state.running, *state.awaiting_kv]
        self._growth: _Growth | None = None
        self._closed = closed or len(self._live) >= state.config.max_num_seqs
        self._queue = _Queue(state, () if self._closed else state.lines)

    @property
    def is_open(self) -> bool:
        return not self._closed and self._queue.first is not None

    def is_before(self, order: _Order) -> bool:
        """Whether whoever is next goes before a running prompt of this order."""
        return self.is_open and self._queue.order < order

    def order_of(self, request: Request) -> _Order:
        return request.level, self._queue.served(request.scope), request.queue_number

    def admit(self) -> None:
        """Admit the next, or close the door for this step. Only while it is open."""
        request = self._queue.first
        assert request is not None, "nobody waits"
        if request.adoption is None and self._batch.budget == 0:
            self._closed = True  # later it may find more of its prompt in the cache
            return
        plan = self._state.tables.plan(request)
        num_free = self._ledger.num_allocatable - self._ledger.cost(plan)
        if num_free < 0 or not self._pays(plan, num_free):
            self._closed = True
            return
        self._ledger.admit(plan)
        if request.adoption is None:
            self._batch.take(request, len(request.token_ids) - plan.num_computed_tokens)
        self._live.append(request)
        self._closed = len(self._live) >= self._state.config.max_num_seqs
        self.admitted.append(Admission(plan, self._queue.take(plan)))

    def _pays(self, plan: AdmissionPlan, num_free: int) -> bool:
        self._growth = self._growth or _Growth(self._state, self._ledger, self._live)
        return self._growth.allows(plan, num_free)


class _Growth:
    """What is asked of the growth policy: about those that run, and those admitted with this decision."""

    def __init__(self, state: SchedulerState, ledger: BlockLedger, live: Sequence[Request]) -> None:
        """`live`: admitted before this decision."""
        self._state = state
        self._anybody_runs = bool(state.running)
        self._block_size = size = state.tables.block_size
        self._streams = [
            self._stream(r, len(r.block_table) + ledger.growth(r), r.num_cached_tokens // size)
            for r in live
            if r.kind is not RequestKind.PREFILL
        ]

    def allows(self, plan: AdmissionPlan, num_free: int) -> bool:
        """Whether it is worth while to admit a request too, which leaves `num_free` blocks. Then count it in.

        One that only computes its prompt does not grow, and is never preempted: it needs to fit, no more. Nor is more
        asked of one that can run at once while nobody does.
        """
        if plan.request.kind is RequestKind.PREFILL:
            return True
        num_shared = len(plan.cached)
        added = self._stream(plan.request, num_shared + plan.num_new, num_shared)
        runs_at_once = plan.request.adoption is None
        must_pay = self._streams and (self._anybody_runs or not runs_at_once)
        if must_pay and not self._state.growth.allows(self._streams, added, num_free, self._state.tokens_per_step):
            return False
        self._streams.append(added)
        self._anybody_runs = self._anybody_runs or runs_at_once
        return True

    def _stream(self, request: Request, num_blocks: int, num_shared: int) -> Stream:
        num_tokens = len(request.token_ids) - num_shared * self._block_size
        return Stream(num_tokens, num_blocks - num_shared, self._state.growth.tokens_to_come(request))


class _Queue:
    """Waiting requests in the order in which they are to be admitted, as the admissions of this decision change it."""

    def __init__(self, state: SchedulerState, lines: Collection[Line]) -> None:
        self._state = state
        self._charges: Counter[bytes] = Counter()
        """Tokens that admissions of this decision will be charged for."""
        self._cursors = [cursor for cursor in map(_Cursor, lines) if cursor.first is not None]
        self._find_first()

    def take(self, plan: AdmissionPlan) -> int:
        """Go on behind `first`, for which `plan` is. Returns the level at which it was first."""
        level, _, _ = self.order
        self._charges[plan.request.scope] += len(plan.request.token_ids) - plan.num_computed_tokens
        self._cursor.advance()
        if self._cursor.first is None:
            self._cursors.remove(self._cursor)
        self._find_first()
        return level

    def served(self, scope: bytes) -> int:
        return self._state.served[scope] + self._charges[scope]

    def _find_first(self) -> None:
        orders = [(self._order_of(cursor), i) for i, cursor in enumerate(self._cursors)]
        self.first: Request | None = None
        if orders:
            self.order, i = min(orders)
            self._cursor = self._cursors[i]
            self.first = self._cursor.first

    def _order_of(self, cursor: _Cursor) -> _Order:
        request = cursor.first
        assert request is not None, "a cursor at its end was dropped"
        level = request.priority
        if not cursor.had_turn:
            level = cursor.line.level(request, self._state.now, self._state.config.priority_step_s)
        return max(level, self._state.best_priority), self.served(request.scope), request.queue_number


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
