"""What one engine step drew for the requests of one router, as the message that says so."""

from __future__ import annotations

from decode_worker.stream import Stream
from engine.block_hash import pack_tokens
from engine.request import FinishReason
from engine.sampler import SampledToken
from kvrelay._wire import finish_reason_to_proto
from kvrelay.v1 import worker_pb2
from worker.outputs import output_to_proto


class OutgoingStep:
    """Columns of what has no logprobs and is of a request with a lane; the rest one by one."""

    def __init__(self) -> None:
        self._step = worker_pb2.Step()
        self._lanes: list[int] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self._finish_reasons = bytearray()

    def add(self, stream: Stream, index: int, token: SampledToken, finish_reason: FinishReason | None) -> None:
        """`index` is the output index of `token`, from 0."""
        if not stream.lane or token.logprobs is not None:
            entry = self._step.outputs.add(request_id=stream.request_id)
            entry.output.CopyFrom(output_to_proto(index, token, finish_reason))
            return
        self._lanes.append(stream.lane)
        self._indexes.append(index)
        self._token_ids.append(token.token_id)
        self._finish_reasons.append(finish_reason_to_proto(None if finish_reason is None else finish_reason.value))

    def to_proto(self) -> worker_pb2.Step:
        if self._lanes:
            columns = self._step.columns
            columns.lanes, columns.indexes = pack_tokens(self._lanes), pack_tokens(self._indexes)
            columns.token_ids = pack_tokens(self._token_ids)
            columns.finish_reasons = bytes(self._finish_reasons)
        return self._step
