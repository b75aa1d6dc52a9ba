"""The path of one request. Read this first.

1. *Admit.* A place among the live requests; then the message is checked and tokenized (`validate`).
2. *Place.* The ready workers are priced (`policy`); the cheapest pair of a prefill worker P and a decode worker D is
   taken. If no decode worker is ready, the request waits a little for one.
3. *Reserve.* D allocates blocks and answers with a ticket: which blocks it lacks, and where they go.
4. *Prefill.* P computes the prompt, sends the blocks that the ticket asks for straight to D, and draws the first token.
   The router listens to D all the while.
5. *First token.* It goes to the client at once, before the last block has landed, and to D (`Start`).
6. *Relay.* D decodes as soon as it has all blocks. Its tokens go on to the client, each index once (`client_stream`).
7. *Finish.* Why, usage, route, waterfall. Exactly one terminal status.

If P fails, D is told to compute what it lacks and steps 6 and 7 stay as they are. If D fails, or refuses, the request
is placed again with the prompt and all tokens so far: the token log is the request. This is the only resume path.

With n > 1, steps 2 to 7 are done for each choice; the others begin when the first one's prompt is on its decode worker.

Cancel, disconnect and deadline are one event: a cancellation of the path where it waits. Each lane to a worker is a
context manager, so leaving the path, however, sends Cancel to every worker that may hold anything.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from engine.block_hash import pack_tokens
from engine.errors import NoFreeBlocks, NoWorkers, ProtocolError, QueueFull
from engine.tokenizer import IncrementalDetokenizer
from kvrelay._wire import finish_reason_from_proto
from kvrelay.v1 import router_pb2, worker_pb2
from router import validate
from router.admission import Admission, LiveRequest
from router.attempt import Attempt, AttemptFailed
from router.choices import all_or_none, choice_of, one_at_a_time
from router.client_stream import ClientStream, Emit, FinishReason
from router.config import RouterConfig
from router.explain import History, RequestRecord
from router.pacing import Pacer
from router.placement import Placed, Placer
from router.prompts import Prompts
from router.registry import Registry
from router.request import GenerationRequest
from router.served_model import ServedModel
from router.session import DrawnToken, Inbox, Lane, drawn_token
from router.shedding import check_in_time
from router.tenants import ANYBODY, Tenant
from router.waterfall import WaterfallRecorder

logger = logging.getLogger(__name__)
WorkT = TypeVar("WorkT", worker_pb2.Reserve, worker_pb2.Prefill)

NO_WORKER_SHARE = 0.9
"""Of the time that is left, how much the wait for a worker may take, so that the client still learns why."""


@dataclass(slots=True)
class _Job:
    """What one request's path carries along."""

    live: LiveRequest
    request: GenerationRequest
    stream: ClientStream
    waterfall: WaterfallRecorder
    record: RequestRecord
    cached_tokens: int = 0
    """As the attempt found it that brought the first token."""
    refused: set[str] = field(default_factory=set)
    """Workers that refused this request or failed it, other than by vanishing. They are not asked again."""
    lost: set[str] = field(default_factory=set)
    """Workers that vanished with this request. Back again, they are asked if nobody else can be."""
    prompt_ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a decode worker has the prompt's KV, or there is none to wait for."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return self.request.num_prompt_tokens + self.stream.log.num_outputs


class Dispatcher:
    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] = validate.draw_seed,
    ) -> None:
        self.admission = Admission(config.max_live_requests)
        self.history = History(config.explain_capacity)
        self.prompts = Prompts(config, model)
        self._config = config
        self._model = model
        self._registry = registry
        self._placer = Placer(config, registry, clock)
        self._clock = clock
        self._draw_seed = draw_seed
        self._pacer = Pacer(config.min_gap_s)
        self._attempts = itertools.count(1)
        self._since = clock()

    def close(self) -> None:
        """Once no call is served any more."""
        self.prompts.close()

    def uptime_ms(self) -> int:
        return round((self._clock() - self._since) * 1000)

    async def generate(
        self,
        message: router_pb2.GenerateRequest,
        emit: Emit,
        timeout_s: float | None,
        tenant: Tenant = ANYBODY,
        traceparent: str = "",
    ) -> None:
        """Serve one call: Accepted, Tokens and Finished go to `emit`; any other end is an `EngineError`.

        `timeout_s` is what the caller's deadline leaves. However the call ends, nothing of it is left here or there.
        """
        waterfall = WaterfallRecorder(self._clock())
        request_id = validate.request_id_of(message)
        timeout_s = self._config.default_timeout_s if timeout_s is None else timeout_s
        key = tenant.qualified(request_id)
        priority = validate.priority_of(message, tenant)
        with self.admission.admit(key, priority, traceparent) as live, self.history.record(key) as record:
            async with live.within(timeout_s):
                request = await self._read(message, request_id, tenant.scope, priority, live)
                n = message.n or 1
                emit = emit if n == 1 else one_at_a_time(emit)
                first = _Job(live, request, self._stream(request, emit, waterfall), waterfall, record)
                await first.stream.accepted()
                waterfall.admitted(self._clock())
                if n == 1:
                    await self._serve(first)
                else:
                    others = [self._serve_further(first, number, emit) for number in range(1, n)]
                    await all_or_none([self._serve(first), *others])

    async def _read(
        self, message: router_pb2.GenerateRequest, request_id: str, scope: bytes, priority: int, live: LiveRequest
    ) -> GenerationRequest:
        validate.check_n(message, self._config.max_n)
        params = validate.read_params(message, self._model, self._draw_seed)
        prompt = await self.prompts.tokens(message, live.remaining_s())
        if message.clamp_max_tokens:
            worker = self._registry.roomiest()
            longest = self._model.max_model_len if worker is None else worker.max_request_tokens
            params = validate.clamped(params, prompt, min(longest, self._model.max_model_len))
        request = validate.complete(request_id, prompt, params, self._model, scope, priority)
        self._check_fits(request)
        return request

    def _stream(
        self, request: GenerationRequest, emit: Emit, waterfall: WaterfallRecorder, choice: int = 0
    ) -> ClientStream:
        detokenizer = IncrementalDetokenizer(self._model.tokenizer)
        return ClientStream(request, detokenizer, waterfall, emit, self._clock, choice, self._config.min_gap_s)

    async def _serve_further(self, first: _Job, number: int, emit: Emit) -> None:
        """Choice `number`. It finds the prompt's KV where the first one brought it."""
        request = choice_of(first.request, number)
        waterfall = first.waterfall.after_admission()
        await first.prompt_ready.wait()
        waterfall.mark("first_choice", self._clock())
        record = RequestRecord(request.request_id)  # the history tells of the first choice
        await self._serve(_Job(first.live, request, self._stream(request, emit, waterfall, number), waterfall, record))

    async def _serve(self, job: _Job) -> None:
        """Place the request until its output is complete: the one resume path."""
        failure: AttemptFailed | None = None
        for number in range(1, self._config.max_attempts + 1):
            if failure is not None:
                job.waterfall.begin_attempt(self._clock())
            placed = await self._place(job, failure)
            job.waterfall.mark("place", self._clock())
            try:
                reason, attempt = await self._attempt(job, placed, number)
            except AttemptFailed as failed:
                failure = failed
                await self._take_back(job, failed, number)
                continue
            job.record.route = attempt.route()
            job.record.waterfall = await job.stream.finish(reason, job.cached_tokens, job.record.route)
            job.record.outcome = finish_reason_from_proto(reason) or ""
            if number == 1:
                actual_ms = self._placer.learn(placed, attempt, job.record.waterfall)
                self.history.settle(job.record, actual_ms, attempt.cached_tokens_where_computed())
            job.prompt_ready.set()
            return
        assert failure is not None
        raise failure.error

    async def _take_back(self, job: _Job, failed: AttemptFailed, number: int) -> None:
        """Leave a failed attempt behind. Raises its error if no worker can do better."""
        logger.warning("attempt %d of %s failed at %s: %s", number, job.request.request_id, failed.worker_id, failed)
        await job.stream.flush()
        if not failed.retryable:
            raise failed.error
        (job.lost if failed.lost else job.refused).add(failed.worker_id)

    async def _place(self, job: _Job, failure: AttemptFailed | None) -> Placed:
        """A pair of ready workers. If there is none, wait for a decode worker, but not for long."""
        wait_s = min(self._no_worker_wait_s(), job.live.remaining_s() * NO_WORKER_SHARE)
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self._check_fits(job.request)
                    placed = self._decide(job)
                    if placed is not None:
                        if job.stream.log.num_outputs == 0 and self._speed_is_known(placed):
                            best, remaining_s = placed.placement.considered(1)[0], job.live.remaining_s()
                            check_in_time(best, remaining_s, job.request.priority)
                        job.record.placed(placed.placement)
                        return placed
                    if failure is not None and self._registry.is_ready():
                        raise failure.error  # every decode worker that there is has refused
                    await self._registry.changed()
        except TimeoutError:
            why = self._registry.why_no_decode_worker()
            raise NoWorkers(f"no decode worker within {wait_s:.3g} s: {why}") from None

    def _speed_is_known(self, placed: Placed) -> bool:
        """Of the worker that would compute the prompt: nobody is refused by a guess."""
        pair = placed.placement
        return self._registry.session(pair.prefill_worker or pair.decode_worker).load.prefill_tokens_per_s > 0

    def _no_worker_wait_s(self) -> float:
        """Shorter where it cannot be hoped that a worker is being replaced."""
        longest = self._config.no_worker_wait_s
        return longest if self._registry.was_ready_lately() else min(longest, self._config.cold_wait_s)

    def _check_fits(self, request: GenerationRequest) -> None:
        """Refuse what no ready worker can ever hold, or would do as it is asked for."""
        self._registry.ignorant_of(request.later_fields)
        worker = self._registry.roomiest()
        if worker is None or worker.max_request_tokens >= self._model.max_model_len:
            return
        why = f"{worker.worker_id} takes no more"
        if worker.pool_is_the_limit:
            why = f"the KV pool of {worker.worker_id} holds {worker.pool_tokens} tokens"
        validate.check_length(request, worker.max_request_tokens, why)

    def _decide(self, job: _Job) -> Placed | None:
        request, tokens = job.request, job.stream.log.tokens()
        return self._placer.place(request, tokens, job.refused | job.lost) or self._placer.place(
            request, tokens, job.refused
        )

    async def _attempt(self, job: _Job, placed: Placed, number: int) -> tuple[FinishReason, Attempt]:
        """Run the request on a pair until its output is complete. Raises `AttemptFailed`."""
        pair = placed.placement
        wire_id = f"{job.request.request_id}.{next(self._attempts)}"
        capacity = self._config.max_unread_messages
        inbox = Inbox(capacity, lambda: job.live.abort(_too_slow(capacity)))
        with ExitStack() as lanes:  # left however the attempt ends: sends Cancel where anything may be held
            decode = lanes.enter_context(self._registry.session(pair.decode_worker).open(wire_id, inbox))
            prefill = None
            if pair.prefill_worker:
                prefill = lanes.enter_context(self._registry.session(pair.prefill_worker).open(wire_id, inbox))
            attempt = Attempt(number, wire_id, inbox, decode, prefill, pair.tokens_to_compute)
            await self._reserve(job, attempt, placed, patient=pair.num_decode_workers == 1)
            reason = None if prefill is None else await self._prefill(job, attempt, prefill)
            if reason is None:
                reason = await self._relay(job, attempt)
            if attempt.started:
                await self._settle(attempt)
            return reason, attempt

    async def _reserve(self, job: _Job, attempt: Attempt, placed: Placed, *, patient: bool) -> None:
        """Step 3. Unless `patient`, the worker gets a share of the time only, so that another can still be asked."""
        wait_s = None if patient else job.live.remaining_s() * self._config.reserve_share
        reserve = self._fill(job, attempt, worker_pb2.Reserve(compute_here=attempt.local, lane=attempt.decode.number))
        if attempt.local:
            attempt.decode.tokens_to_compute = attempt.tokens_to_compute
        attempt.decode.send(worker_pb2.SessionRequest(reserve=reserve))
        self._placer.dispatched(placed)
        try:
            async with asyncio.timeout(wait_s):
                while attempt.reserved is None:
                    await self._listen(job, attempt)
                    attempt.check_decode()
        except TimeoutError:
            worker_id = attempt.decode.worker.worker_id
            error = NoFreeBlocks(f"{worker_id} had no blocks for the request in its share of the time")
            raise AttemptFailed(error, worker_id, retryable=True, lost=False) from None
        if not attempt.local:
            job.waterfall.mark("reserve_rpc", self._clock(), [("reserve_wait", attempt.reserved.wait_us)])

    async def _prefill(self, job: _Job, attempt: Attempt, lane: Lane) -> FinishReason | None:
        """Steps 4 and 5. A reason if the first token was the last; None if the decode worker goes on.

        The decode worker goes on without a first token too, if the prefill worker fails or is too slow.
        """
        assert attempt.reserved is not None
        prefill = self._fill(job, attempt, worker_pb2.Prefill(ticket=attempt.reserved.ticket))
        lane.tokens_to_compute = attempt.tokens_to_compute
        lane.send(worker_pb2.SessionRequest(prefill=prefill))
        try:
            async with asyncio.timeout(job.live.remaining_s() * self._config.prefill_share):
                while attempt.prefilled is None and attempt.prefill_closed is None:
                    await self._listen(job, attempt)
                    attempt.check_decode()
        except TimeoutError:
            logger.warning("%s takes too long to prefill %s", lane.worker.worker_id, attempt.wire_id)
        prefilled = attempt.prefilled
        if prefilled is None:
            self._give_up_prefill(job, attempt, lane)
            return None
        reported = [("prefill_queue", prefilled.queue_us), ("prefill_compute", prefilled.compute_us)]
        job.waterfall.mark("prefill_rpc", self._clock(), reported)
        reason = self._accept(job, attempt, lane, [drawn_token(prefilled.output)])
        if reason is None:
            attempt.start(pack_tokens((prefilled.output.token_id,)))  # before the client, which may be slow to read
        await job.stream.flush()
        return reason

    async def _relay(self, job: _Job, attempt: Attempt) -> FinishReason:
        """Step 6. Whatever has come goes out as one message."""
        while True:
            outputs, attempt.outputs = attempt.outputs, []
            if outputs and not job.waterfall.has_first_token:
                # Without a prefill worker, `Reserved` says how long the prompt waited for its turn.
                waited = [("reserve_wait", attempt.reserved.wait_us)] if attempt.local and attempt.reserved else []
                job.waterfall.mark("decode_prefill", self._clock(), waited)
            reason = self._accept(job, attempt, attempt.decode, outputs)
            await job.stream.flush()
            if reason is not None:
                return reason
            attempt.check_decode()
            if attempt.prefill is not None and attempt.kv_is_open and attempt.prefill_failed:
                self._give_up_prefill(job, attempt, attempt.prefill)
            if job.stream.pause_s:
                await self._pacer.wait()
            await self._listen(job, attempt)

    async def _settle(self, attempt: Attempt) -> None:
        """Wait for the decode worker's account of the transfer, which is usually there long before."""
        try:
            async with asyncio.timeout(self._config.handover_wait_s):
                while attempt.kv_is_open:
                    await attempt.listen()
        except TimeoutError:
            logger.warning("%s gave no account of %s", attempt.decode.worker.worker_id, attempt.wire_id)

    async def _listen(self, job: _Job, attempt: Attempt) -> None:
        await attempt.listen()
        if attempt.handed_over is not None:
            job.waterfall.handed_over(self._clock())
        if attempt.handed_over is not None or (attempt.local and attempt.outputs):
            job.prompt_ready.set()

    def _give_up_prefill(self, job: _Job, attempt: Attempt, lane: Lane) -> None:
        """Let the decode worker compute what has not come. No new placement is needed for that."""
        if attempt.compute_missing:
            return
        closed = attempt.prefill_closed
        (job.lost if closed is not None and closed.lost else job.refused).add(lane.worker.worker_id)
        why = "took too long" if closed is None else closed.error or "ended without a token"
        logger.warning(
            "%s computes %s: %s %s", attempt.decode.worker.worker_id, attempt.wire_id, lane.worker.worker_id, why
        )
        job.waterfall.mark("prefill_failed", self._clock())
        attempt.decode.tokens_to_compute = job.num_tokens
        attempt.ask_to_compute_missing()

    def _accept(self, job: _Job, attempt: Attempt, lane: Lane, outputs: Sequence[DrawnToken]) -> FinishReason | None:
        """Take the next tokens up to the one that completes the output."""
        if outputs and job.stream.log.num_outputs == 0:
            job.cached_tokens = attempt.cached_tokens(job.request)
        try:
            return job.stream.accept(outputs)
        except ProtocolError as error:
            raise AttemptFailed(error, lane.worker.worker_id, retryable=True, lost=False) from error

    def _fill(self, job: _Job, attempt: Attempt, message: WorkT) -> WorkT:
        """What both workers get of a request."""
        message.request_id = attempt.wire_id
        message.token_ids = job.stream.log.tokens()
        message.num_prompt_tokens = job.request.num_prompt_tokens
        message.sampling.CopyFrom(job.request.sampling)
        message.scope = job.request.scope
        message.priority = job.request.priority
        message.traceparent = job.live.traceparent
        message.num_public_tokens = job.request.num_public_tokens
        message.timeout_ms = max(1, int(job.live.remaining_s() * 1000))
        return message


def _too_slow(max_unread: int) -> QueueFull:
    return QueueFull(f"the client reads too slowly: {max_unread} messages of workers wait for it")
