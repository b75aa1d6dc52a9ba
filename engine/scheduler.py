"""Owns the queues: who waits, who runs, what the next step computes. Knows no tensors, no token's meaning, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine.adoption import Adoption
from engine.batch import GrantedBlocks, ScheduledBatch, ScheduledSequence
from engine.block_hash import BlockIdentity
from engine.block_manager import BlockManager
from engine.block_names import BlockNames
from engine.block_tables import BlockTables
from engine.borrowing import Loan
from engine.config import CacheConfig, SchedulerConfig
from engine.decision import Admission, SchedulerState, decide
from engine.engine_stats import QueueStats
from engine.errors import EngineError, InternalError, QueueFull, RequestError
from engine.fair_share import TenantShares, WaitingRequests
from engine.growth import GrowthPolicy, LearntGrowth
from engine.host_tier import HostTier
from engine.request import Request, RequestKind, RequestStatus

_TOKENS_PER_STEP = 64.0
"""Assumed until it is measured; between that of a small CPU and that of a large GPU."""
_QUEUED = (RequestStatus.WAITING, RequestStatus.RUNNING)


class Scheduler:
    """Continuous batching under a token budget and a block budget. `decide` (engine.decision) is the policy; here is
    what it works on, and what becomes of its decisions.

    There is no prefill phase and no decode phase: each request has tokens known and tokens computed, and every step
    lets the second catch up with the first.

    Where a live request is (checked by `check_integrity`); `_live` has them all:
      WAITING in `_waiting`; AWAITING_KV in `_awaiting_kv`; RUNNING in `_running`; HELD in none of the three.

    Whose turn it is, at the door and for the token budget of prompts: the best priority; of those the tenant that was
    served the fewest tokens; of its requests the oldest. Nobody overtakes who is next at the door. A line of waiting
    requests (one tenant, one priority) without a turn for `priority_step_s` competes as one of the next better
    priority, and so on up to the best that is live. So whatever comes in, a line of priority p is, after (p - q) x
    `priority_step_s` without a turn, one of the best priority q, and has its turn as soon as its tenant is the one
    that was served the fewest tokens. A request keeps the level at which it was admitted while it runs.

    Why there is no deadlock. A request is admitted only with blocks for all known tokens and one to grow into, so a
    prompt is never stuck half computed, and a hand-over needs nothing more from this pool. When a running request
    must grow and no block is free, the last in precedence (the worst level, then the latest) goes back to its line,
    so the first in precedence ends up with every block that running requests hold, and it fits: larger ones are
    refused at the door. Only blocks that a link touches (AWAITING_KV, HELD, quarantine, and PREFILL, which is never
    preempted) can keep the first waiting. None of them waits for blocks, and each ends by a deadline outside: the
    ticket's lease, the sender's deadline, the fence of the link. Meanwhile nobody is admitted, so what comes free goes
    to the first. Growth beyond the block at admission is a forecast (`engine.growth`), which only ever defers an
    admission while others run.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        block_manager: BlockManager,
        identity: BlockIdentity,
        max_model_len: int,
        *,
        growth: GrowthPolicy | None = None,
        host: HostTier | None = None,
        names: BlockNames | None = None,
    ) -> None:
        self._config = config
        self._cache_config = cache_config
        self._max_model_len = max_model_len
        self._pool = block_manager
        self._tables = BlockTables(cache_config, block_manager, identity, host, names)
        self._host = host
        self._shares = TenantShares()
        self._growth = growth or LearntGrowth(cache_config.block_size)
        self._live: dict[str, Request] = {}
        self._waiting = WaitingRequests()
        self._awaiting_kv: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._num_accepted = 0
        self._num_preemptions = 0
        self._num_swaps = 0
        self._blocked = False
        """The last step found nothing to do, and nothing has changed since."""

    def add(self, request: Request) -> None:
        """Accept a request into the queue.

        Raises `RequestError` if it can never be served here, `QueueFull` if too many wait; then nothing has changed.
        """
        self._check_fits(request)
        self._check_queue(request.scope)
        if request.kind is RequestKind.DECODE:
            request.adoption = Adoption(num_tokens=len(request.token_ids))
        self._num_accepted += 1
        request.queue_number = self._num_accepted
        self._live[request.request_id] = request
        self._shares.enter(request.scope)
        self._waiting.add(request)
        self._blocked = False

    def add_all(self, requests: Iterable[Request]) -> None:
        """As `add` each; if one is refused, none was accepted."""
        accepted: list[Request] = []
        try:
            for request in requests:
                self.add(request)
                accepted.append(request)
        except EngineError:
            for request in accepted:
                self.finish(request)
            raise

    def schedule(self, now: float, tokens_per_step: float = 0.0) -> ScheduledBatch:
        """Choose what the next step computes, and change queues and block tables accordingly.

        The chosen tokens count as computed once `computed` says so. `now`: monotonic, of the clock of
        `Request.arrival`. `tokens_per_step`: see `engine.growth`; 0 while nobody has measured it.
        """
        decision = decide(self.snapshot(now, tokens_per_step))
        for request in decision.preempted:
            self._preempt(request)
        for admission in decision.admitted:
            self._tables.hold(admission.plan)
        for request in decision.growing:
            if not self._tables.grow(request):
                raise InternalError(f"request {request.request_id} cannot have the blocks that were planned for it")
        for admission in decision.admitted:
            self._tables.fill(admission.plan)
        self._tables.settle()
        granted = [grant for admission in decision.admitted if (grant := self._begin(admission, now))]
        began_at_once = any(grant.request.status is RequestStatus.RUNNING for grant in granted)
        self._blocked = not (decision.gets_ahead or began_at_once)
        return ScheduledBatch(decision.sequences, tuple(granted))

    def snapshot(self, now: float, tokens_per_step: float = 0.0) -> SchedulerState:
        """What `schedule` would decide upon with these arguments."""
        running, awaiting_kv, lines = self._running.values(), self._awaiting_kv.values(), self._waiting.lines
        priorities = [line.priority for line in lines]
        priorities += [request.priority for request in (*running, *awaiting_kv)]
        return SchedulerState(
            config=self._config,
            now=now,
            running=running,
            awaiting_kv=awaiting_kv,
            lines=lines,
            served=self._shares.served,
            best_priority=min(priorities, default=0),
            tables=self._tables,
            pool=self._pool,
            growth=self._growth,
            tokens_per_step=tokens_per_step or _TOKENS_PER_STEP,
        )

    def fork(self, parent: Request, child: Request, num_tokens: int) -> None:
        """Let `child`, which is waiting, run at once from the KV that `parent` has of their first `num_tokens` tokens.

        If there is no seat for it, or no such KV any more, it computes them itself in its turn.
        """
        child.sample_of = None
        self._blocked = False
        if len(self._running) + len(self._awaiting_kv) >= self._config.max_num_seqs:
            return
        runs = parent.status is RequestStatus.RUNNING and num_tokens > 0
        if runs and self._tables.fork(parent, child, num_tokens):
            child.level = parent.level
            self._waiting.remove(child)
            self._run(child)

    def pin(self, name: str, scope: bytes, token_ids: Sequence[int]) -> int:
        """Keep what is resident of a prefix from eviction. Returns how many tokens that is.

        Raises `PinLimit` if that is more than may be pinned, or leaves too little for a request that was accepted.
        """
        needed = max((self._blocks_needed(request) for request in self._live.values()), default=0)
        return self._tables.pin(name, scope, token_ids, max_blocks=self._cache_config.num_blocks - needed)

    def computed(self, sequence: ScheduledSequence) -> None:
        """The KV of a scheduled sequence's tokens is in its blocks."""
        sequence.request.num_computed_tokens += sequence.num_tokens
        if sequence.samples:
            self._shares.charge(sequence.request.scope, 1)
        self._tables.publish(sequence.request)

    def adopt(self, request: Request, ordinal: int) -> None:
        """The KV of one missing block arrived and was verified. Ignored once the request waits for it no more."""
        adoption, awaits_kv = request.adoption, request.status is RequestStatus.AWAITING_KV and request.kv_will_come
        if adoption is not None and awaits_kv and ordinal in adoption.missing:
            self._tables.close_transfer(request, (ordinal,))
            adoption.adopt(ordinal)
            self._settle(request)

    def borrow(self, request: Request, loan: Loan) -> None:
        self._tables.borrow(request, loan)
        self._settle(request)

    def take_back(self, lost: Collection[int]) -> None:
        """These borrowed blocks hold other KV by now: who computes from them starts again from its tokens."""
        for request in [r for r in self._running.values() if not set(lost).isdisjoint(r.block_table)]:
            self._preempt(request)
        self._blocked = False

    def start(self, request: Request) -> None:
        """`request.token_ids` has all that the router knows. Ignored if it was started before."""
        if request.adoption is not None:
            request.adoption.started = True
            self._settle(request)

    def give_up_transfer(self, request: Request) -> None:
        """Keep what has arrived up to the first gap, and compute the rest. Ignored if there is nothing to give up."""
        adoption = request.adoption
        if adoption is None or adoption.given_up or request.status is RequestStatus.HELD:
            return
        self._tables.close_transfer(request, adoption.missing)
        adoption.given_up = True
        self._settle(request)

    def hold(self, request: Request) -> None:
        """Compute no more for it, but keep its blocks for the link; they go with `finish`."""
        self._leave_queues(request)
        request.transition(RequestStatus.HELD)

    def fail(self, request: Request) -> None:
        """The request cannot go on. Its blocks are freed, or held if a link may touch them."""
        sending = request.kind is RequestKind.PREFILL and request.block_table and not request.transfer_over
        if sending or request.status is RequestStatus.AWAITING_KV:
            self.hold(request)
        else:
            self.finish(request)

    def finish(self, request: Request, busy_slots: Collection[int] = ()) -> None:
        """Forget a live request, wherever it is, and free its blocks. `busy_slots` stay in quarantine until `quiet`."""
        if request.status is RequestStatus.RUNNING and request.kind is not RequestKind.PREFILL:
            self._growth.observe(request.num_output_tokens)
        self._leave_queues(request)
        del self._live[request.request_id]
        self._shares.leave(request.scope)
        request.transition(RequestStatus.FINISHED)
        self._tables.free(request, busy_slots)
        if self._host is not None:
            self._host.unpark(request.request_id)

    def quiet(self, slots: Iterable[int]) -> None:
        """No link touches these slots any more on behalf of one request that finished with them busy."""
        self._tables.quiet(slots)
        self._blocked = False

    def get(self, request_id: str) -> Request | None:
        return self._live.get(request_id)

    @property
    def live(self) -> Collection[Request]:
        """All that are not FINISHED, oldest first."""
        return self._live.values()

    def has_work(self) -> bool:
        """Whether `schedule` may find something to do, now or in the steps that follow, without any other call."""
        return not self._blocked and bool(self._running or self._waiting)

    def stats(self) -> QueueStats:
        computing = [r for r in self._live.values() if r.status in _QUEUED and not (r.kv_will_come or r.draws_along)]
        tokens = (request.num_uncomputed_tokens for request in computing)
        num_held = len(self._live) - len(self._running) - len(self._waiting) - len(self._awaiting_kv)
        return QueueStats(
            running=len(self._running),
            waiting=len(self._waiting),
            awaiting_kv=len(self._awaiting_kv),
            held=num_held,
            waiting_tokens=sum(count for count in tokens if count > 1),
            preemptions=self._num_preemptions,
            swaps=self._num_swaps,
        )

    def check_integrity(self) -> None:
        """Re-derive the invariants of the queues, the block tables and the pool."""
        queues = (
            ({request.request_id for request in self._waiting}, RequestStatus.WAITING),
            (self._awaiting_kv.keys(), RequestStatus.AWAITING_KV),
            (self._running.keys(), RequestStatus.RUNNING),
        )
        for queue, status in queues:
            expected = {request.request_id for request in self._live.values() if request.status is status}
            assert queue == expected, f"{status.value}: queued {sorted(queue)}, by status {sorted(expected)}"
        self._waiting.check_integrity()
        self._shares.check_integrity(Counter(request.scope for request in self._live.values()))
        assert len(self._running) + len(self._awaiting_kv) <= self._config.max_num_seqs
        for request in self._live.values():
            room = len(request.block_table) * self._cache_config.block_size
            assert request.num_computed_tokens <= min(room, len(request.token_ids)), f"{request.request_id} lacks KV"
            assert request.status is not RequestStatus.WAITING or not request.block_table
        self._tables.check_integrity(self._live.values())

    def _preempt(self, request: Request) -> None:
        """Free the blocks; its tokens stay. Its KV is copied to host memory, if so set and there is room, or computed
        again later, from whatever is cached still."""
        if self._config.preemption == "swap" and self._tables.park(request):
            self._num_swaps += 1
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._start_over(request)

    def _start_over(self, request: Request) -> None:
        """From RUNNING back to the queue, without blocks."""
        del self._running[request.request_id]
        request.transition(RequestStatus.WAITING)
        self._tables.free(request)
        request.num_computed_tokens = 0
        self._waiting.add(request)

    def _begin(self, admission: Admission, now: float) -> GrantedBlocks | None:
        """The request has its blocks: run it, or let a link bring what is missing."""
        request = admission.plan.request
        self._waiting.take_turn(request, now)
        request.level = admission.level
        if request.num_preemptions == 0:
            self._shares.charge(request.scope, request.num_uncomputed_tokens)
        adoption = request.adoption
        if adoption is None:
            self._run(request)
            return None
        request.transition(RequestStatus.AWAITING_KV)
        self._awaiting_kv[request.request_id] = request
        cached = request.num_computed_tokens
        granted = GrantedBlocks(request, cached, self._tables.open_transfer(request, adoption))
        self._settle(request)
        return granted

    def _settle(self, request: Request) -> None:
        """Take stock of what is resident, and run the request if it waits for nothing more.

        At least the last token known is left to compute: its logits give the next. That is the router's first token,
        whose KV nobody has; or the last of the prompt, if the prefill worker died before it told that token.
        """
        adoption = request.adoption
        if adoption is None or request.status is not RequestStatus.AWAITING_KV:
            return
        self._tables.exchange(request, adoption)
        resident = adoption.resident_tokens(self._cache_config.block_size)
        request.num_computed_tokens = min(resident, len(request.token_ids) - 1)
        self._tables.publish(request)
        if adoption.settled:
            request.num_recomputed_tokens = adoption.num_tokens - request.num_computed_tokens
            request.adoption = None
            del self._awaiting_kv[request.request_id]
            self._run(request)
            if self._tables.lacks_context(request):
                request.num_recomputed_tokens = adoption.num_tokens
                self._start_over(request)
        self._blocked = False

    def _run(self, request: Request) -> None:
        request.transition(RequestStatus.RUNNING)
        self._running[request.request_id] = request

    def _leave_queues(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._awaiting_kv.pop(request.request_id, None)
            self._running.pop(request.request_id, None)
        self._blocked = False

    def _check_fits(self, request: Request) -> None:
        if request.request_id in self._live:
            raise RequestError("request_id", f"{request.request_id!r} is live already")
        num_prompt, max_tokens = request.num_prompt_tokens, request.params.max_tokens
        if num_prompt + max_tokens > self._max_model_len:
            raise RequestError(
                "max_tokens",
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed max_model_len {self._max_model_len}",
            )
        if request.num_output_tokens >= max_tokens:
            raise RequestError("max_tokens", f"{max_tokens}, but {request.num_output_tokens} were drawn already")
        needed, num_withheld = self._blocks_needed(request), self._tables.num_withheld(request)
        if needed > self._cache_config.num_blocks - num_withheld:
            raise RequestError(
                "max_tokens",
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} may need {needed} blocks of "
                f"{self._cache_config.block_size} tokens; the pool has {self._cache_config.num_blocks}"
                + (f", of which {num_withheld} are pinned" if num_withheld else ""),
            )

    def _check_queue(self, scope: bytes) -> None:
        """The last eighth of the queue is for tenants that have less than an equal share of it: a flood of one leaves
        the others a way in."""
        num_waiting, limit = len(self._waiting), self._config.max_waiting
        num_kept = limit // 8
        if num_waiting >= limit:
            raise QueueFull(f"{num_waiting} requests are waiting, max_waiting is {limit}")
        num_own = self._waiting.num_of(scope)
        if num_waiting >= limit - num_kept and num_own * max(1, self._waiting.num_tenants) >= num_waiting:
            raise QueueFull(
                f"{num_waiting} requests are waiting, {num_own} of them of this tenant; the last {num_kept} places of "
                f"max_waiting {limit} are for others"
            )

    def _blocks_needed(self, request: Request) -> int:
        """At worst."""
        return self._cache_config.blocks_for(request.max_kv_tokens)
