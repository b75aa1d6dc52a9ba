"""Puts the events of one Generate call together and refuses any order that the protocol does not allow.

Pure: both clients feed it, neither decides anything itself.
"""

from __future__ import annotations

from dataclasses import replace

from engine.errors import EngineError, InternalError, RequestError
from kvrelay.types import Chunk, Generation, Route, TokenLogprobs, Usage, Waterfall, finish_reason_of
from kvrelay.v1 import router_pb2


class GenerationAssembly:
    """Owns what has arrived of one call: of each of its `n` choices, tokens and last word.

    Invariant: the token indices of a choice are contiguous from 0, so the number of its tokens is the next index. The
    router promises the same; it is checked here again because a token lost or repeated would otherwise go unseen.
    """

    def __init__(self, n: int = 1) -> None:
        self.request_id = ""
        """As the router accepted it; empty until then."""
        self._choices = [_Choice() for _ in range(n)]
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
            return self._choice(response.tokens.choice, event).add(response.tokens)
        chunk = self._choice(response.finished.choice, event).finish(response.finished, self.request_id)
        finished = [choice.generation for choice in self._choices if choice.generation is not None]
        if len(finished) == len(self._choices):
            self._result = replace(finished[0], further=tuple(finished[1:]))
        return chunk

    def _accept(self, accepted: router_pb2.Accepted) -> None:
        if self.request_id:
            raise InternalError(f"the router accepted the request twice, as {self.request_id}")
        if not accepted.request_id:
            raise InternalError("the router accepted the request without giving its id")
        self.request_id = accepted.request_id

    def _choice(self, number: int, event: str) -> _Choice:
        if number >= len(self._choices):
            raise InternalError(f"the router sent {event} of choice {number}; {len(self._choices)} were asked for")
        choice = self._choices[number]
        if choice.generation is not None:
            raise InternalError(f"the router sent {event} of choice {number} after its end")
        return choice


class _Choice:
    def __init__(self) -> None:
        self.generation: Generation | None = None
        """Once it is finished."""
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, tokens: router_pb2.Tokens) -> Chunk:
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

    def finish(self, finished: router_pb2.Finished, request_id: str) -> Chunk | None:
        """Text that was held back until now comes as a last chunk without tokens."""
        usage = Usage.from_proto(finished.usage)
        if usage.completion_tokens != len(self._token_ids):
            raise InternalError(f"the router counted {usage.completion_tokens} tokens, {len(self._token_ids)} arrived")
        reason = finish_reason_of(finished)
        self._text.append(finished.text)
        self.generation = Generation(
            request_id=request_id,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=usage,
            logprobs=tuple(self._logprobs),
            route=Route.from_proto(finished.route),
            waterfall=Waterfall.from_proto(finished.waterfall),
        )
        return Chunk(len(self._token_ids), (), finished.text, (), finished.choice) if finished.text else None
