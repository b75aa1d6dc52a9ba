"""The router's end of one connection to one worker: which requests are on it, and what waits to be sent.

Knows messages, no sockets. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Self, TypeAlias, cast

from engine.block_hash import unpack_tokens
from engine.errors import EngineError, ProtocolError, RequestError, WorkerLost
from kvrelay._status import error_from_name
from kvrelay._wire import MAX_U32
from kvrelay.v1 import common_pb2, worker_pb2
from router.block_follower import BlockFollower
from router.peer import Peer
from router.prefix_index import PrefixIndex
from router.snapshot import WorkerSnapshot


@dataclass(frozen=True, slots=True)
class LaneClosed:
    """Last message of a lane. `error` is None if the worker is simply done with the request."""

    error: EngineError | None
    retryable: bool
    lost: bool
    """The session is over, as opposed to the worker having said so."""


DrawnToken: TypeAlias = tuple[int, int, common_pb2.FinishReason.ValueType, common_pb2.TokenLogprobs | None]
"""Output index, token id, why it is the last one if it is, logprobs where asked for. A tuple: one for each token."""
LaneMessage: TypeAlias = worker_pb2.Reserved | worker_pb2.Prefilled | worker_pb2.HandedOver | DrawnToken | LaneClosed


class Inbox:
    """What the workers of one attempt said and its dispatcher has not read yet, in order of arrival. Bounded."""

    def __init__(self, capacity: int, on_overflow: Callable[[], None]) -> None:
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._messages: deque[tuple[Lane, LaneMessage]] = deque()
        self._arrived = asyncio.Event()

    def put(self, lane: Lane, message: LaneMessage) -> bool:
        """False: it is full. The message is dropped and the owner has been told to end the request."""
        if len(self._messages) >= self._capacity:
            self._on_overflow()
            return False
        self._messages.append((lane, message))
        self._arrived.set()
        return True

    async def take(self) -> list[tuple[Lane, LaneMessage]]:
        """Everything that is there, at least one message. A cancelled call has taken nothing."""
        while not self._messages:
            self._arrived.clear()
            await self._arrived.wait()
        taken = list(self._messages)
        self._messages.clear()
        return taken


class Lane:
    """One attempt of one request at one worker.

    A context manager: leaving it sends Cancel, unless the worker said that nothing of the request is left there or
    nothing was ever sent. `close` is idempotent.
    """

    def __init__(self, session: WorkerSession, request_id: str, number: int, inbox: Inbox) -> None:
        self._session = session
        self._request_id = request_id
        self.number = number
        """By which the worker may call it; not 0, and of no other lane of the session."""
        self._inbox = inbox
        self._used = False
        self.closed = False
        """No message comes or goes any more."""
        self._tokens_to_compute = 0

    @property
    def worker(self) -> Peer:
        return self._session.peer

    @property
    def tokens_to_compute(self) -> int:
        """Tokens that this worker was asked to compute and is not known to have."""
        return self._tokens_to_compute

    @tokens_to_compute.setter
    def tokens_to_compute(self, value: int) -> None:
        if value != self._tokens_to_compute:
            self._tokens_to_compute = value
            self._session.changed()

    def send(self, message: worker_pb2.SessionRequest) -> None:
        """Queue `message`; dropped if the lane is closed, which the inbox tells."""
        if not self.closed:
            self._used = True
            self._session.send(message)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._session.forget(self._request_id, self.number)
        if self._used:
            self._session.send(worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(request_id=self._request_id)))

    def deliver(self, message: LaneMessage) -> None:
        """From the session. A full inbox closes the lane, so that the worker stops too."""
        if self.closed:
            return
        if not self._inbox.put(self, message):
            self.close()
        elif isinstance(message, LaneClosed):
            self.closed = True
            self._session.forget(self._request_id, self.number)

    def deliver_token(self, token: DrawnToken) -> None:
        """`deliver` of what nearly all messages are, on a lane that the session knows."""
        if not self._inbox.put(self, token):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WorkerSession:
    """Owns the lanes and the outbox of one connection.

    Invariants: a lane is in `_lanes` exactly while it is not closed; a session that is over has no lanes. The number
    of requests in flight at the worker is the number of lanes, and nothing else counts it.
    """

    def __init__(
        self, peer: Peer, max_outbox: int, abort: Callable[[], None], index: PrefixIndex | None = None
    ) -> None:
        """What the worker tells of its blocks goes to `index`, if it tells any."""
        self.peer = peer
        self.load = worker_pb2.Load()
        self._snapshot: WorkerSnapshot | None = None
        """As long as nothing in it has changed."""
        self.strays = 0
        """Messages on requests that were over here: they crossed with a Cancel."""
        self._max_outbox = max_outbox
        self._abort = abort
        self._lanes: dict[str, Lane] = {}
        self._by_number: dict[int, Lane] = {}
        """The same."""
        self._num_opened = 0
        self._outbox: deque[worker_pb2.SessionRequest] = deque()
        self._queued = asyncio.Event()
        self._idle = asyncio.Event()
        """Set while there are no lanes."""
        self._idle.set()
        self._over: WorkerLost | None = None
        self.blocks: BlockFollower | None = None
        """None: the worker does not tell, or the session is over."""
        if index is not None and peer.tells_blocks:
            self.blocks = BlockFollower(index, self._ask_for_list, _now())

    @property
    def in_flight(self) -> int:
        return len(self._lanes)

    @property
    def in_flight_tokens(self) -> int:
        return sum(lane.tokens_to_compute for lane in self._lanes.values())

    @property
    def outbox_size(self) -> int:
        """Messages that wait to be written."""
        return len(self._outbox)

    def open(self, request_id: str, inbox: Inbox) -> Lane:
        """A lane for `request_id`, which must be new to this worker. Raises `WorkerLost` if the session is over."""
        if self._over is not None:
            raise self._over
        assert request_id not in self._lanes, f"{request_id} is on {self.peer.worker_id} already"
        self._num_opened += 1
        number = self._num_opened % MAX_U32 + 1  # lanes of long ago are closed
        lane = self._lanes[request_id] = self._by_number[number] = Lane(self, request_id, number, inbox)
        self._idle.clear()
        self.changed()
        return lane

    def forget(self, request_id: str, number: int) -> None:
        self._lanes.pop(request_id, None)
        self._by_number.pop(number, None)
        if not self._lanes:
            self._idle.set()
        self.changed()

    async def wait_idle(self) -> None:
        """Return once no request is here. A session that is over has none."""
        await self._idle.wait()

    def changed(self) -> None:
        """Something that a snapshot tells."""
        self._snapshot = None

    def snapshot(self) -> WorkerSnapshot:
        """The same object until something in it has changed."""
        slot = self.blocks.slot if self.blocks is not None else None
        if self._snapshot is None or self._snapshot.slot != slot:
            self._snapshot = self._new_snapshot(slot)
        return self._snapshot

    def send(self, message: worker_pb2.SessionRequest) -> None:
        """Queue `message`; dropped if the session is over. A worker that lets too many pile up is given up."""
        if self._over is not None:
            return
        if len(self._outbox) >= self._max_outbox:
            self.end(WorkerLost(f"{self.peer.worker_id} does not read: {self._max_outbox} messages wait for it"))
            self._abort()
            return
        self._outbox.append(message)
        self._queued.set()

    async def outgoing(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        """What to write, without end. For the one writer, which is cancelled with the call."""
        while True:
            while self._outbox:
                yield self._outbox.popleft()
            self._queued.clear()
            await self._queued.wait()

    def deliver(self, response: worker_pb2.SessionResponse) -> None:
        """Give a message of the worker to the request it is about. Raises `ProtocolError` on one out of place."""
        kind = response.WhichOneof("message")
        if kind == "step":
            self._deliver_columns(response.step.columns)
            for entry in response.step.outputs:
                self._deliver(entry.request_id, drawn_token(entry.output))
        elif kind == "load":
            self.load = response.load
            self.changed()
        elif kind == "reserved":
            self._deliver(response.reserved.request_id, response.reserved)
        elif kind == "prefilled":
            self._deliver(response.prefilled.request_id, response.prefilled)
        elif kind == "handed_over":
            self._deliver(response.handed_over.request_id, response.handed_over)
        elif kind == "ended":
            self._deliver(response.ended.request_id, _lane_closed(response.ended))
        elif kind == "block_changes":
            if self.blocks is not None:
                self.blocks.apply(response.block_changes, _now())
        elif kind == "welcome":
            raise ProtocolError("the worker sent a second welcome")
        # None: a message of a newer protocol. It is about nothing that we asked for.

    def end(self, reason: WorkerLost) -> None:
        """Close every lane with `reason`. Later calls change nothing."""
        if self._over is not None:
            return
        self._over = reason
        self._outbox.clear()
        blocks, self.blocks = self.blocks, None
        if blocks is not None:
            blocks.close()
        for lane in list(self._lanes.values()):
            lane.deliver(LaneClosed(reason, retryable=True, lost=True))
        self.check_integrity()

    @property
    def over(self) -> WorkerLost | None:
        return self._over

    def check_integrity(self) -> None:
        assert not any(lane.closed for lane in self._lanes.values()), "a closed lane is still known"
        assert self._over is None or not self._lanes, "a session that is over has lanes"
        assert set(self._by_number.values()) == set(self._lanes.values()), "a lane is known by one name only"

    def _new_snapshot(self, slot: int | None) -> WorkerSnapshot:
        peer, load = self.peer, self.load
        reported = load.blocks_free + load.blocks_cached + load.blocks_owned + load.blocks_leased > 0
        return WorkerSnapshot(
            worker_id=peer.worker_id,
            role=peer.role,
            block_size=peer.block_size,
            num_blocks=peer.num_blocks,
            max_model_len=peer.max_model_len,
            running=load.running,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            blocks_available=load.blocks_free + load.blocks_cached if reported else peer.num_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_step_ms=load.decode_step_ms,
            in_flight=self.in_flight,
            in_flight_tokens=self.in_flight_tokens,
            slot=slot,
        )

    def _ask_for_list(self, number: int) -> None:
        self.send(worker_pb2.SessionRequest(list_blocks=worker_pb2.ListBlocks(number=number)))

    def _deliver_columns(self, columns: worker_pb2.OutputColumns) -> None:
        """The tokens of one step. This and what it calls is most of what a token costs a router."""
        try:
            numbers, indexes, token_ids = map(unpack_tokens, (columns.lanes, columns.indexes, columns.token_ids))
        except RequestError as error:
            raise ProtocolError(f"columns of a step: {error.description}") from error
        reasons = columns.finish_reasons
        if not len(numbers) == len(indexes) == len(token_ids) == len(reasons):
            raise ProtocolError("the columns of a step differ in length")
        by_number = self._by_number
        for number, token in zip(numbers, zip(indexes, token_ids, reasons, repeat(None)), strict=True):
            if (lane := by_number.get(number)) is None:
                self.strays += 1
            else:
                lane.deliver_token(cast(DrawnToken, token))

    def _deliver(self, request_id: str, message: LaneMessage) -> None:
        lane = self._lanes.get(request_id)
        if lane is None:
            self.strays += 1
        else:
            lane.deliver(message)


def drawn_token(output: worker_pb2.Output) -> DrawnToken:
    logprobs = output.logprobs if output.HasField("logprobs") else None
    return output.index, output.token_id, output.finish_reason, logprobs


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lane_closed(ended: worker_pb2.Ended) -> LaneClosed:
    error = error_from_name(ended.error, ended.message) if ended.error else None
    return LaneClosed(error, retryable=ended.retryable, lost=False)
