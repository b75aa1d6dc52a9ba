"""One engine: requests in, tokens out, one step at a time. Read `Engine.step` first; it is the whole system.

Life of a LOCAL request: `submit` -> WAITING -> RUNNING, a token a step once its prompt is computed -> FINISHED.
PREFILL: the same up to the first token, then HELD until `release_held`: a link is reading its blocks.
DECODE: `reserve` -> WAITING -> blocks granted, AWAITING_KV -> `adopted` for each block, `start` -> RUNNING -> FINISHED;
or `give_up_transfer` instead of the rest of the blocks, and it computes what is missing.

Knows no links, no messages and no threads: `StepLoop` owns the thread on which everything here is called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from engine import damage
from engine.adoption import MissingBlock, Reservation
from engine.batch import GrantedBlocks, ScheduledBatch
from engine.block_events import EventBatch, Snapshot
from engine.block_hash import BlockIdentity
from engine.block_names import BlockNames
from engine.borrowing import BorrowingBlockManager, Loan
from engine.config import CacheConfig, SchedulerConfig
from engine.engine_stats import EngineStats
from engine.errors import DigestMismatch, InternalError, RequestError
from engine.host_tier import HostStats
from engine.interruption import PassStopped
from engine.kv_cache import KvCache
from engine.lending import LendingBlockManager
from engine.model.decoder import Model
from engine.model_runner import ModelRunner, check_model_fits_pool
from engine.parallel_sampling import common_prefix
from engine.pool_manager import host_tier, pool_manager
from engine.prompt_logprobs import prompt_logprobs
from engine.request import Request, RequestKind, RequestStatus
from engine.sampler import SampledToken, TokenLogprobs
from engine.scheduler import Scheduler
from engine.step_output import RequestUpdate, StepOutput
from engine.step_rates import StepRates

__all__ = ["Engine", "EngineStats", "MissingBlock", "RequestUpdate", "Reservation", "StepOutput"]

_log = logging.getLogger(__name__)


class Engine:
    """Single-threaded. Every method but the constructor and `doom` belongs to the engine thread.

    Calls that name a request which is not live (any more) change nothing and are counted: messages cross.
    """

    def __init__(
        self,
        model: Model,
        kv: KvCache,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        identity: BlockIdentity,
        max_model_len: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        incarnation: str = "",
    ) -> None:
        """`incarnation` of the worker: goes with the events of its blocks."""
        check_model_fits_pool(model, kv, cache_config)
        self._config = model.config
        self._kv_layout = kv.layout
        self._runner = ModelRunner(model, kv)
        self._host = host_tier(kv)
        self._blocks = pool_manager(kv, cache_config, self._host.store if self._host else None, incarnation)
        self.names = BlockNames()
        self._scheduler = Scheduler(
            scheduler_config, cache_config, self._blocks, identity, max_model_len, host=self._host, names=self.names
        )
        self._clock = clock
        self._rates = StepRates()
        self._reserving: dict[str, tuple[Callable[[Reservation], None], float]] = {}
        """Reservations without blocks so far: whom to tell, and since when they wait."""
        self._num_unknown_ids = 0

    def step(self) -> StepOutput:
        """Schedule, compute, draw, apply. Computes nothing if no request can get ahead, or `doom` broke it off.

        A fault of model or sampler fails the requests of this batch, and no others; logits that no token can be drawn
        from fail the one request that they are for.
        """
        began = self._clock()
        self._take_back()
        batch = self._scheduler.schedule(began, self._rates.tokens_per_step)
        self._announce(batch.granted)
        if not batch.sequences:
            return StepOutput()
        draws = batch.draws
        try:
            logits = self._runner.forward(batch)  # [positions whose logits are wanted, vocab] float32
            told = prompt_logprobs(batch, logits)
            if len(draws) != len(logits):
                logits = logits[[row for row, _ in draws]]
            tokens = self._runner.sample(logits, [request for _, request in draws])
        except PassStopped:
            return StepOutput()
        except Exception as error:  # noqa: BLE001
            # edge: a model may raise anything, and it must cost its own batch only
            _log.exception("a step with %d requests failed", len(batch.sequences))
            return self._fail([sequence.request for sequence in batch.sequences], error)
        drawn = {request.request_id: token for (_, request), token in zip(draws, tokens, strict=True)}
        updates = self._apply(self._without_lost(batch), drawn, told, began)
        self._rates.record(batch, self._clock() - began)
        return StepOutput(updates)

    def submit(self, request: Request) -> None:
        """Accept a LOCAL or PREFILL request.

        Raises `RequestError` if it can never be served here, `QueueFull` if too many wait; then nothing has changed.
        """
        self._check_tokens(request.token_ids)
        if request.kind is RequestKind.DECODE:
            raise InternalError(f"request {request.request_id} needs a reservation: call reserve")
        self._scheduler.add(request)

    def fork(self, parent_id: str, children: Sequence[Request]) -> None:
        """Accept LOCAL or PREFILL requests that begin as another one does, to run from its KV.

        A child with just the parent's tokens draws along at the parent's next draw, from the same logits: so n
        samples of a prompt (`parallel_sampling.further_samples`) cost one prefill. A child with other tokens shares
        at once what the parent has computed of those that both begin with. They share blocks, the last, partial one
        too, until one of them is to write into it; but in a quantized type a child with other tokens shares whole
        blocks only, as the scale of the next one may be that of tokens which it has not. A child whose parent is gone,
        or comes to an end without a draw, computes its tokens itself. Raises as `submit` does, and `InternalError` if a
        child is of another scope than its parent, or begins with more or fewer public tokens; then none was accepted.
        """
        parent = self._find(parent_id)
        for child in children:
            self._check_tokens(child.token_ids)
            if child.kind is RequestKind.DECODE:
                raise InternalError(f"request {child.request_id} needs a reservation: call reserve")
            if child.prompt_logprobs is not None:
                raise InternalError(f"request {child.request_id}: prompt_logprobs of a prompt that it does not compute")
            if parent is None:
                continue
            if (child.scope, child.num_public_tokens) != (parent.scope, parent.num_public_tokens):
                raise InternalError(f"scope of request {child.request_id} is not that of {parent_id}: no KV is shared")
        self._scheduler.add_all(children)
        if parent is None:
            return
        for child in children:
            if child.token_ids == parent.token_ids:
                parent.samples.append(child)
                child.sample_of = parent
            else:
                self._branch(parent, child)

    def reserve(self, request: Request, granted: Callable[[Reservation], None]) -> None:
        """Accept a DECODE request: it gets blocks for all its tokens and one to grow into, in its turn.

        `granted` is called once they are there, from a later step, and never if the request ends before. It must not
        block, raise, or call the engine. From then on a link may write into the missing blocks, until they are
        `adopted` or given up.
        Raises as `submit` does.
        """
        self._check_tokens(request.token_ids)
        if request.kind is not RequestKind.DECODE:
            raise InternalError(f"request {request.request_id} needs no reservation: call submit")
        self._scheduler.add(request)
        self._reserving[request.request_id] = (granted, self._clock())

    def adopted(self, request_id: str, *ordinals: int) -> None:
        """The KV of these missing blocks is in their slots and verified. Ignored if it is not expected any more."""
        if request := self._find(request_id):
            for ordinal in ordinals:
                self._scheduler.adopt(request, ordinal)

    def borrow(self, request_id: str, loan: Loan) -> None:
        """Missing blocks of the request need not come: they can be read where they are, in a peer's pool. What is not
        expected any more goes back. Raises `InternalError` if the request has one of them already; then all do."""
        if request := self._find(request_id):
            self._scheduler.borrow(request, loan)
        else:
            loan.give_back(len(loan.blocks))

    def start(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append the tokens that the router has emitted since `reserve`. The request runs once its KV is settled.

        A second call is ignored. Raises `RequestError` for tokens outside the vocabulary or beyond `max_tokens`; then
        nothing has changed.
        """
        request = self._find(request_id)
        if request is None or request.adoption is None or request.adoption.started:
            return
        self._check_tokens(token_ids)
        num_output = request.num_output_tokens + len(token_ids)
        if num_output >= request.params.max_tokens:
            raise RequestError("max_tokens", f"{request.params.max_tokens}, but {num_output} were drawn already")
        request.token_ids += token_ids
        self._scheduler.start(request)

    def give_up_transfer(self, request_id: str) -> None:
        """Wait for no more blocks: keep those adopted up to the first gap, compute the rest here.

        Missing slots must be quiet: they stay this request's, and are written by compute. The request still waits for
        `start`. `Request.num_recomputed_tokens` tells the cost once it runs.
        """
        if request := self._find(request_id):
            self._scheduler.give_up_transfer(request)

    def release_held(self, request_id: str) -> None:
        """No link reads the blocks of this PREFILL request (any more): they need not be held once it is computed."""
        request = self._find(request_id)
        if request is None:
            return
        request.transfer_over = True
        if request.status is RequestStatus.HELD:
            self._scheduler.finish(request)

    def cancel(self, request_id: str, busy_slots: Collection[int] = ()) -> None:
        """Forget the request at once, whatever its status, and free its blocks. Tells nobody. Idempotent.

        `busy_slots`: those of its blocks that a link may still write or read. They go to quarantine, and each needs
        one `quiet`, called after this.
        """
        self._runner.cancels.forget(request_id)
        if request := self._find(request_id):
            self._reserving.pop(request_id, None)
            self._scheduler.finish(request, busy_slots)

    def doom(self, request_id: str) -> None:
        """From any thread, before `cancel` is posted: the step that runs is broken off if that pays for the others."""
        self._runner.cancels.doom(request_id)

    def quiet(self, slots: Iterable[int]) -> None:
        """No link touches these slots for one cancelled request any more. Slots that are not busy are ignored."""
        self._scheduler.quiet(slots)

    def fail_all(self, error: Exception) -> StepOutput:
        """End every request that is not HELD with `InternalError`, after a fault that no one batch is to blame for."""
        return self._fail([r for r in self._scheduler.live if r.status is not RequestStatus.HELD], error)

    def pin(self, name: str, scope: bytes, token_ids: Sequence[int]) -> int:
        """Keep what is resident of a prefix from eviction until `unpin(name)`. Returns how many tokens that is.

        Fewer than the whole blocks of `token_ids`: compute a request that begins with them, and pin again. Raises
        `PinLimit` if that would leave too little for requests; then nothing has changed.
        """
        self._check_tokens(token_ids)
        return self._scheduler.pin(name, scope, token_ids)

    def unpin(self, name: str) -> None:
        """An unknown name is ignored."""
        self._blocks.unpin(name)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, pinned or not. False, and nothing has changed, while any block is in use."""
        if not self._blocks.reset_prefix_cache():
            return False
        if self._host is not None:
            self._host.clear()
        return True

    def generation(self, block: int) -> int:
        """Of a block of the pool: grows each time that it is handed out, or discarded."""
        return self._blocks.generation(block)

    def discard(self, block: int, generation: int) -> StepOutput:
        """The bytes of a block are not those that were written into it: nobody finds it any more, nor what continues
        it. Requests that compute from it end with `DigestMismatch`. Ignored if it has another generation by now."""
        if self._blocks.generation(block) != generation:
            return StepOutput()
        error = DigestMismatch(f"block {block} of the KV pool does not hold what was written into it")
        return self._fail(damage.discard(block, self._blocks, self._host, self._scheduler.live), error)

    @property
    def lender(self) -> LendingBlockManager | None:
        """What lends blocks of this pool to peers. None: it lends none."""
        return self._blocks if isinstance(self._blocks, LendingBlockManager) else None

    def take_block_events(self) -> EventBatch:
        """What became resident and what was evicted since the last call."""
        return self._blocks.take_events()

    def block_snapshot(self) -> Snapshot:
        """All contents that are resident, to start or restart from with the events that follow."""
        return self._blocks.snapshot()

    def has_work(self) -> bool:
        """Whether steps can get a request ahead without any other call. False: wait for a call, do not step."""
        return self._scheduler.has_work()

    def stats(self) -> EngineStats:
        host = self._host.stats() if self._host else HostStats()
        queues = self._scheduler.stats()
        return EngineStats.of(self._blocks.stats(), queues, self._rates, host, self._num_unknown_ids)

    def check_integrity(self) -> None:
        """Re-derive every invariant of queues, block tables and pool. For tests and idle moments."""
        self._scheduler.check_integrity()
        waiting = (r for r in self._scheduler.live if r.status is RequestStatus.WAITING)
        assert self._reserving.keys() == {r.request_id for r in waiting if r.adoption is not None}

    def _take_back(self) -> bool:
        if isinstance(self._blocks, BorrowingBlockManager) and (lost := self._blocks.find_lost()):
            self._scheduler.take_back(lost)
            return True
        return False

    def _without_lost(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Without the results of requests whose borrowed blocks were taken back during the step: these start again."""
        if not self._take_back():
            return batch
        return replace(batch, sequences=tuple(s for s in batch.sequences if s.request.status is RequestStatus.RUNNING))

    def _announce(self, grants: Iterable[GrantedBlocks]) -> None:
        for grant in grants:
            request = grant.request
            granted, since = self._reserving.pop(request.request_id)
            waited = self._clock() - since
            granted(Reservation(request.request_id, grant.cached_tokens, grant.missing, waited))

    def _apply(
        self,
        batch: ScheduledBatch,
        drawn: Mapping[str, SampledToken | InternalError],
        told: Mapping[str, tuple[TokenLogprobs, ...]],
        began: float,
    ) -> tuple[RequestUpdate, ...]:
        updates, suspects = list[RequestUpdate](), list[int]()
        for sequence in batch.sequences:
            if isinstance(error := drawn.get(sequence.request.request_id), InternalError):
                suspects += damage.suspects(sequence.request, error)
                updates.append(self._failed(sequence.request, error))  # and KV that may be as bad is never published
                continue
            self._scheduler.computed(sequence)
            drawing = [sequence.request, *self._part(sequence.request)] if sequence.samples else [sequence.request]
            for request in drawing:
                if request.first_scheduled is None:
                    request.first_scheduled = began
                logprobs = told.get(request.request_id, ())
                request.num_prompt_logprobs += len(logprobs)
                update = self._advance(request, drawn.get(request.request_id))
                updates.append(replace(update, prompt_logprobs=logprobs) if logprobs else update)
        for block in dict.fromkeys(suspects):
            updates += self.discard(block, self.generation(block)).updates
        return tuple(updates)

    def _part(self, parent: Request) -> list[Request]:
        """Give the parent's samples its KV before its own draw may end it. Returns those that drew along."""
        along = parent.drawing_along
        waiting = [child for child in parent.samples if child.status is RequestStatus.WAITING]
        parent.samples = []
        for child in waiting:
            if child in along:
                self._scheduler.fork(parent, child, parent.num_computed_tokens)
            else:
                self._branch(parent, child)
        return along

    def _branch(self, parent: Request, child: Request) -> None:
        """Let `child` run from what `parent` has computed of their common tokens; one is left to draw from."""
        limit = min(parent.num_computed_tokens, len(child.token_ids) - 1)
        num_tokens = common_prefix(parent.token_ids, child.token_ids, limit)
        if self._kv_layout.quantized:
            num_tokens -= num_tokens % self._kv_layout.block_size
        self._scheduler.fork(parent, child, num_tokens)

    def _advance(self, request: Request, token: SampledToken | InternalError | None) -> RequestUpdate:
        if isinstance(token, InternalError):
            return self._failed(request, token)
        index, num_computed = request.num_output_tokens, request.num_computed_tokens
        if token is None:
            return RequestUpdate(request.request_id, num_computed, None, index)
        request.token_ids.append(token.token_id)
        reason = request.finish_reason(self._config.eos_token_ids)
        if request.kind is RequestKind.PREFILL and not request.transfer_over:
            self._scheduler.hold(request)
        elif request.kind is RequestKind.PREFILL or reason is not None:
            self._scheduler.finish(request)
        return RequestUpdate(request.request_id, num_computed, token, index, reason)

    def _fail(self, requests: Iterable[Request], cause: Exception) -> StepOutput:
        return StepOutput(tuple(self._failed(request, cause) for request in requests))

    def _failed(self, request: Request, cause: Exception) -> RequestUpdate:
        error = damage.error_of(request, cause)
        index, num_computed = request.num_output_tokens, request.num_computed_tokens
        self._reserving.pop(request.request_id, None)
        self._scheduler.fail(request)
        return RequestUpdate(request.request_id, num_computed, None, index, error=error)

    def _check_tokens(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._config.vocab_size:
                limit = self._config.vocab_size
                raise RequestError("prompt_token_ids", f"each must be in [0, {limit}), got {token_id}")

    def _find(self, request_id: str) -> Request | None:
        request = self._scheduler.get(request_id)
        if request is None:
            self._num_unknown_ids += 1
        return request
