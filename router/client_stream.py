"""What the client of one request gets: each output token once, in order, its text, then the last word."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from kvrelay.v1 import common_pb2, router_pb2, worker_pb2
from router.request import GenerationRequest, TokenLog
from router.text import Detokenizer, TextStream
from router.waterfall import WaterfallRecorder

Emit = Callable[[router_pb2.GenerateResponse], Awaitable[None]]
"""Hands a message to gRPC; waits while the client does not read."""
FinishReason: TypeAlias = common_pb2.FinishReason.ValueType
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


class ClientStream:
    """Owns the token log of a request, and what of it the client has not been sent yet.

    Invariant: what was sent and what is pending are together the output in the log.
    """

    def __init__(
        self,
        request: GenerationRequest,
        detokenizer: Detokenizer,
        waterfall: WaterfallRecorder,
        emit: Emit,
        clock: Callable[[], float],
        choice: int = 0,
        min_gap_s: float = 0.0,
    ) -> None:
        """`choice` numbers the outputs of one call; `min_gap_s` is the least time between messages of a fast output."""
        params = request.params
        self.log = TokenLog(request)
        self._request = request
        self._text = TextStream(detokenizer, params.stop, params.min_tokens)
        self._waterfall = waterfall
        self._emit = emit
        self._clock = clock
        self._choice = choice
        self._min_gap_s = min_gap_s
        self._flushed_at = -math.inf
        self._pause_s = 0.0
        self._pending: list[worker_pb2.Output] = []
        self._pending_text: list[str] = []

    async def accepted(self) -> None:
        request = self._request
        await self._emit(
            router_pb2.GenerateResponse(
                accepted=router_pb2.Accepted(request_id=request.request_id, prompt_tokens=request.num_prompt_tokens)
            )
        )

    def accept(self, output: worker_pb2.Output) -> FinishReason | None:
        """Take the next output token; return why the output is complete, if it is now.

        Raises `ProtocolError`, and changes nothing, if it is not the next one.
        """
        self.log.append(output.index, output.token_id)
        self._pending.append(output)
        if output.finish_reason == STOP:
            return STOP  # a stop token gives no text
        self._pending_text.append(self._text.push(output.index, output.token_id))
        if self._text.stopped:
            return STOP
        return LENGTH if self.log.full or output.finish_reason == LENGTH else None

    @property
    def pause_s(self) -> float:
        """How long to let tokens gather before the next `flush`.

        Nothing for an output whose messages have `min_gap_s` between them anyway: its tokens never wait. A faster one
        goes out in fewer, larger messages, of which a router can send only so many.
        """
        return self._pause_s

    async def flush(self) -> None:
        """Send what is pending as one message."""
        if not self._pending:
            return
        outputs, texts = self._pending, self._pending_text
        self._pending, self._pending_text = [], []
        tokens = router_pb2.Tokens(
            index=outputs[0].index,
            token_ids=b"".join(output.token_id.to_bytes(4, "little") for output in outputs),
            text="".join(texts),
            choice=self._choice,
        )
        if self._request.params.logprobs is not None:
            tokens.logprobs.extend(output.logprobs for output in outputs)
        await self._emit(router_pb2.GenerateResponse(tokens=tokens))
        now = self._clock()
        self._waterfall.emitted(self.log.num_outputs, now)
        fast = len(outputs) > 1 or now - self._flushed_at < self._min_gap_s
        self._pause_s = self._min_gap_s if fast else 0.0
        self._flushed_at = now

    async def finish(self, reason: FinishReason, cached_tokens: int, route: router_pb2.Route) -> router_pb2.Waterfall:
        """Send the last word, and return the waterfall that went with it."""
        await self.flush()
        completion_tokens = self.log.num_outputs
        waterfall = self._waterfall.to_proto(completion_tokens)
        finished = router_pb2.Finished(
            reason=reason,
            text=self._text.finish(),
            usage=router_pb2.Usage(
                prompt_tokens=self._request.num_prompt_tokens,
                completion_tokens=completion_tokens,
                cached_tokens=cached_tokens,
            ),
            route=route,
            waterfall=waterfall,
            choice=self._choice,
        )
        await self._emit(router_pb2.GenerateResponse(finished=finished))
        return waterfall
