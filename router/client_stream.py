"""What the client of one request gets: each output token once, in order, its text, then the last word."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from kvrelay.v1 import common_pb2, router_pb2
from router.request import GenerationRequest, TokenLog
from router.session import DrawnToken
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
        self._num_sent = 0
        """Output tokens that the client was sent."""
        self._logprobs: list[common_pb2.TokenLogprobs] | None = None if params.logprobs is None else []
        """Of the others; None: not asked for."""
        self._pending_ids: list[int] = []
        """Of the others, those whose text was not asked for yet."""
        self._num_texts = 0
        """Tokens whose text was asked for."""
        self._pending_text = ""

    async def accepted(self) -> None:
        request = self._request
        await self._emit(
            router_pb2.GenerateResponse(
                accepted=router_pb2.Accepted(request_id=request.request_id, prompt_tokens=request.num_prompt_tokens)
            )
        )

    def accept(self, outputs: Sequence[DrawnToken]) -> FinishReason | None:
        """Take the next output tokens up to the one that completes the output; return why it is complete, if it is.

        Raises `ProtocolError` at one that is not the next; those before it are taken.
        """
        first = index = self.log.num_outputs
        limit, stops, logprobs, reason = self.log.limit, self._text.stops, self._logprobs, None
        taken: list[int] = []
        misplaced: DrawnToken | None = None
        for output in outputs:
            at, token_id, why, token_logprobs = output
            if at != index or index >= limit:
                misplaced = output
                break
            taken.append(token_id)
            index += 1
            if logprobs is not None:
                logprobs.append(token_logprobs or common_pb2.TokenLogprobs())
            if stops and why != STOP and self._stops_with(token_id):
                why = STOP
            if why in (STOP, LENGTH) or index == limit:
                reason = STOP if why == STOP else LENGTH
                break
        if taken:
            self.log.take(first, taken)
            if not stops:  # a stop token gives no text
                self._pending_ids += taken[:-1] if reason == STOP else taken
        if misplaced is not None:
            self.log.take(misplaced[0], [misplaced[1]])
        return reason

    @property
    def pause_s(self) -> float:
        """How long to let tokens gather before the next `flush`: `min_gap_s`, or not at all.

        Nothing for an output whose messages have `min_gap_s` between them anyway: its tokens never wait. A faster one
        goes out in fewer, larger messages, of which a router can send only so many.
        """
        return self._pause_s

    async def flush(self) -> None:
        """Send what is pending as one message."""
        index, num_outputs = self._num_sent, self.log.num_outputs
        if index == num_outputs:
            return
        self._take_text()
        text, logprobs = self._pending_text, self._logprobs
        self._pending_text, self._num_sent = "", num_outputs
        message = router_pb2.GenerateResponse()
        tokens = message.tokens
        tokens.index, tokens.token_ids, tokens.text = index, self.log.outputs_from(index), text
        tokens.choice = self._choice
        if logprobs is not None:
            self._logprobs = []
            tokens.logprobs.extend(logprobs)
        await self._emit(message)
        now = self._clock()
        self._waterfall.emitted(num_outputs, now)
        fast = num_outputs - index > 1 or now - self._flushed_at < self._min_gap_s
        self._pause_s = self._min_gap_s if fast else 0.0
        self._flushed_at = now

    def _stops_with(self, token_id: int) -> bool:
        """Whether the text of the next token completes a stop string."""
        self._pending_ids.append(token_id)
        self._take_text()
        return self._text.stopped

    def _take_text(self) -> None:
        """Of all that has come: much cheaper for many tokens at once."""
        if self._pending_ids:
            self._pending_text += self._text.push(self._num_texts, self._pending_ids)
            self._num_texts += len(self._pending_ids)
            self._pending_ids.clear()

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
