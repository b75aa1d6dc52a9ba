"""One placement of a request: the lanes to its two workers, what they have said, and what was asked of them.

Decides nothing; `dispatch` does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.errors import EngineError, InternalError
from kvrelay.v1 import router_pb2, worker_pb2
from router.request import GenerationRequest
from router.session import DrawnToken, Inbox, Lane, LaneClosed


class AttemptFailed(Exception):
    """A placement came to nothing. The request itself may go on elsewhere if `retryable`."""

    def __init__(self, error: EngineError, worker_id: str, *, retryable: bool, lost: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.worker_id = worker_id
        self.retryable = retryable
        self.lost = lost
        """The worker vanished. If not, it refused, and need not be asked again."""


@dataclass(slots=True)
class Attempt:
    number: int
    """From 1."""
    wire_id: str
    """The request's id on the wire: unique to the attempt."""
    inbox: Inbox
    decode: Lane
    prefill: Lane | None
    """None: the decode worker computes the prompt."""
    tokens_to_compute: int = 0
    """Of the prompt, by the one or the other, as far as was known."""
    reserved: worker_pb2.Reserved | None = None
    prefilled: worker_pb2.Prefilled | None = None
    handed_over: worker_pb2.HandedOver | None = None
    outputs: list[DrawnToken] = field(default_factory=list)
    """Of the decode worker, not yet taken."""
    decode_closed: LaneClosed | None = None
    prefill_closed: LaneClosed | None = None
    started: bool = False
    compute_missing: bool = False
    """The decode worker was told that the prefill worker sends no more."""

    async def listen(self) -> None:
        """Wait for something to be said, and note all of it."""
        for lane, message in await self.inbox.take():
            if isinstance(message, tuple):  # nearly all: one a token
                if lane is self.decode:
                    self.outputs.append(message)
            else:
                self._note(lane, message)
        if self.outputs and self.decode.tokens_to_compute:
            self.decode.tokens_to_compute = 0

    def check_decode(self) -> None:
        """Raise `AttemptFailed` if the decode worker is done with a request that is not.

        Not before its outputs were taken: the last one of them may end the request.
        """
        closed = self.decode_closed
        if closed is None or self.outputs:
            return
        worker_id = self.decode.worker.worker_id
        if closed.error is None:
            error = InternalError(f"{worker_id} ended the request before its last token")
            raise AttemptFailed(error, worker_id, retryable=True, lost=False)
        raise AttemptFailed(closed.error, worker_id, retryable=closed.retryable, lost=closed.lost)

    @property
    def local(self) -> bool:
        """Whether the decode worker was to compute the prompt from the start."""
        return self.prefill is None

    @property
    def prefill_failed(self) -> bool:
        """Whether the prefill worker ended badly, or without having said anything of use."""
        closed = self.prefill_closed
        return closed is not None and (closed.error is not None or self.prefilled is None)

    @property
    def kv_is_open(self) -> bool:
        """Whether the decode worker still has to say where the prompt's KV came from."""
        return self.prefill is not None and self.handed_over is None and self.decode_closed is None

    def start(self, token_ids: bytes) -> None:
        """Tell the decode worker to go on from `token_ids`."""
        self.started = True
        self.decode.tokens_to_compute = 0
        self.decode.send(
            worker_pb2.SessionRequest(start=worker_pb2.Start(request_id=self.wire_id, token_ids=token_ids))
        )

    def ask_to_compute_missing(self) -> None:
        """Tell the decode worker to compute whatever KV has not come; end what the prefill worker may still do."""
        self.started = self.compute_missing = True
        if self.prefill is not None:
            self.prefill.close()
        self.decode.send(
            worker_pb2.SessionRequest(start=worker_pb2.Start(request_id=self.wire_id, compute_missing=True))
        )

    def cached_tokens(self, request: GenerationRequest) -> int:
        """Prompt tokens whose KV some prefix cache had."""
        at_decode = self.reserved.ticket.cached_tokens if self.reserved is not None else 0
        at_prefill = self.prefilled.cached_tokens if self.prefilled is not None else 0
        return min(max(at_decode, at_prefill), request.num_prompt_tokens)

    def cached_tokens_where_computed(self) -> int:
        """Tokens whose KV the worker that computed the prompt had already."""
        if self.prefilled is not None:
            return self.prefilled.cached_tokens
        return self.reserved.ticket.cached_tokens if self.reserved is not None else 0

    def route(self) -> router_pb2.Route:
        handed_over = self.handed_over or worker_pb2.HandedOver()
        prefilled = self.prefilled or worker_pb2.Prefilled()
        block_size = self.decode.worker.block_size
        cached = self.reserved.ticket.cached_tokens // block_size if self.reserved is not None else 0
        return router_pb2.Route(
            prefill_worker=self.prefill.worker.worker_id if self.prefill is not None else "",
            decode_worker=self.decode.worker.worker_id,
            attempts=self.number,
            blocks_computed=prefilled.blocks_computed,
            blocks_sent=max(handed_over.blocks_received, handed_over.blocks_adopted),  # older workers tell no refusals
            blocks_adopted=handed_over.blocks_adopted,
            blocks_cached=handed_over.blocks_cached or cached,
            bytes_sent=handed_over.bytes_received,
            recomputed_tokens=handed_over.recomputed_tokens,
            transport=handed_over.transport,
            transfer_us=handed_over.transfer_us,
            transfer_error=handed_over.error,
            prefill_cached_tokens=prefilled.cached_tokens,
            decode_cached_tokens=self.reserved.ticket.cached_tokens if self.reserved is not None else 0,
        )

    def _note(
        self, lane: Lane, message: worker_pb2.Reserved | worker_pb2.Prefilled | worker_pb2.HandedOver | LaneClosed
    ) -> None:
        if lane is self.prefill and self.compute_missing:
            return  # it was given up; what it said crossed with that
        match message:
            case worker_pb2.Reserved():
                self.reserved = message
            case worker_pb2.Prefilled():
                self.prefilled = message
                lane.tokens_to_compute = 0
            case worker_pb2.HandedOver():
                self.handed_over = message
            case LaneClosed() if lane is self.decode:
                self.decode_closed = message
            case LaneClosed():
                self.prefill_closed = message
