"""Puts the events of one Generate call together and refuses any order that the protocol does not allow.

Pure: both clients feed it, neither decides anything itself.
"""

from __future__ import annotations

from engine.errors import EngineError, InternalError, RequestError
from kvrelay.types import Chunk, Generation, Route, TokenLogprobs, Usage, Waterfall, finish_reason_of
from kvrelay.v1 import router_pb2


class GenerationAssembly:
    """Owns what has arrived of one answer.

    Invariant: token indices are contiguous from 0, so `len(token_ids)` is the next index. The router promises the
    same; it is checked here again because a token lost or repeated would otherwise go unseen.
    """

    def __init__(self) -> None:
        self.request_id = ""
        """As the router accepted it; empty until then."""
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._result: Generation | None = None
        self._error: EngineError | None = None

    def feed(self, response: router_pb2.GenerateResponse) -> Chunk | None:
        """The chunk to hand out, if this event brings one. Raises `InternalError` if it breaks the protocol."""
        try:
            return self._apply(response)
        except InternalError as error:
            self.fail(error)
            raise

    def end(self) -> None:
        """The stream ended with status OK. Raises `InternalError` if the answer was not complete."""
        if self._result is None:
            error = InternalError("the router ended the stream without a last word on the request")
            self.fail(error)
            raise error

    def fail(self, error: EngineError) -> None:
        """Remember why there will be no result. The first reason stays; after the result it changes nothing."""
        if self._error is None:
            self._error = error

    @property
    def result(self) -> Generation:
        """Raises what the stream ended with, or `RequestError` if it has not ended."""
        if self._result is not None:
            return self._result
        if self._error is not None:
            raise self._error
        raise RequestError("result", "there is none before the end of the stream: read it to its end first")

    def _apply(self, response: router_pb2.GenerateResponse) -> Chunk | None:
        event = response.WhichOneof("event")
        if event is None:
            raise InternalError("the router sent an event that this client does not know")
        if self._result is not None:
            raise InternalError(f"the router sent {event} after the end of the answer")
        if event == "accepted":
            self._accept(response.accepted)
            return None
        if not self.request_id:
            raise InternalError(f"the router sent {event} before it accepted the request")
        if event == "tokens":
            return self._add(response.tokens)
        return self._finish(response.finished)

    def _accept(self, accepted: router_pb2.Accepted) -> None:
        if self.request_id:
            raise InternalError(f"the router accepted the request twice, as {self.request_id}")
        if not accepted.request_id:
            raise InternalError("the router accepted the request without giving its id")
        self.request_id = accepted.request_id

    def _add(self, tokens: router_pb2.Tokens) -> Chunk:
        try:
            chunk = Chunk.from_proto(tokens)
        except RequestError as error:  # a torn token id: here it is the router's fault, not the caller's
            raise InternalError(f"the router sent tokens that cannot be read: {error.description}") from error
        if chunk.index != len(self._token_ids):
            raise InternalError(f"token {len(self._token_ids)} was due, the router sent {chunk.index}")
        if not chunk.token_ids:
            raise InternalError(f"the router sent no token at index {chunk.index}")
        if chunk.logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            raise InternalError(f"{len(chunk.logprobs)} logprobs came with {len(chunk.token_ids)} tokens")
        self._token_ids += chunk.token_ids
        self._logprobs += chunk.logprobs
        self._text.append(chunk.text)
        return chunk

    def _finish(self, finished: router_pb2.Finished) -> Chunk | None:
        """Text that was held back until now comes as a last chunk without tokens."""
        usage = Usage.from_proto(finished.usage)
        if usage.completion_tokens != len(self._token_ids):
            raise InternalError(f"the router counted {usage.completion_tokens} tokens, {len(self._token_ids)} arrived")
        reason = finish_reason_of(finished)
        self._text.append(finished.text)
        self._result = Generation(
            request_id=self.request_id,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=usage,
            logprobs=tuple(self._logprobs),
            route=Route.from_proto(finished.route),
            waterfall=Waterfall.from_proto(finished.waterfall),
        )
        return Chunk(len(self._token_ids), (), finished.text, ()) if finished.text else None
