"""The synchronous client: one gRPC channel to one router. Messages are built in `_request`, read in `_assembly`."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from engine.errors import InternalError, RequestCancelled
from kvrelay import _request, _status
from kvrelay._assembly import GenerationAssembly
from kvrelay._channel import Metadata, Tls, metadata_of, open_channel
from kvrelay._request import ANSWER_MARGIN_S, DEFAULT_TIMEOUT_S, DEFAULT_WAIT_S, GenerateOptions
from kvrelay.changes import ClusterChange
from kvrelay.types import Chunk, ClusterStatus, Explanation, Generation, Messages, ModelCard
from kvrelay.v1 import router_pb2, router_pb2_grpc

RequestT = TypeVar("RequestT", contravariant=True)
ResponseT = TypeVar("ResponseT", covariant=True)


class _Method(Protocol[RequestT, ResponseT]):
    def __call__(self, request: RequestT, /, *, timeout: float, metadata: Metadata) -> ResponseT: ...


class _Call(Protocol):
    """A running server stream; gRPC's own type for it promises less."""

    def __next__(self) -> router_pb2.GenerateResponse: ...
    def cancel(self) -> object: ...


class GenerationStream(Iterator[Chunk]):
    """One answer as it arrives: iterate over its chunks, then read `result`.

    Leaving the `with` block, or `close()`, before the end cancels the request everywhere. One thread iterates; any
    thread may close.
    """

    def __init__(self, call: _Call, address: str, n: int = 1) -> None:
        self._call = call
        self._address = address
        self._assembly = GenerationAssembly(n)
        self._ended = False

    @property
    def request_id(self) -> str:
        """The id under which the router knows the request; empty before the first chunk."""
        return self._assembly.request_id

    @property
    def result(self) -> Generation:
        """The whole answer. Raises the error that the stream ended with, or `RequestError` before the end."""
        return self._assembly.result

    def __next__(self) -> Chunk:
        """Raises the request's error once; afterwards the stream is over and `result` raises it again."""
        while not self._ended:
            try:
                chunk = self._assembly.feed(next(self._call))
            except StopIteration:
                self._ended = True
                self._assembly.end()
            except InternalError:
                self.close()
                raise
            except grpc.RpcError as error:
                self._ended = True
                ours = _status.from_rpc_error(error, self._address)
                self._assembly.fail(ours)
                raise ours from error
            else:
                if chunk is not None:
                    return chunk
        raise StopIteration

    def close(self) -> None:
        """Cancel the request if it still runs. Idempotent."""
        self._ended = True
        self._assembly.fail(RequestCancelled("the stream was closed before its end"))
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Client:
    """Calls one router. Threads may share it.

    `timeout_s` is the deadline of every call that gives none of its own. Errors are those of `engine.errors`, which
    `kvrelay` exports. Only a call that had no answer from a router that ended is sent again, to its successor.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        """`address` is HOST:PORT. Connects at the first call. Raises `ConfigError` for an address of another form."""
        self._address = _request.check_address(address)
        self._timeout_s = _request.check_timeout(timeout_s)
        self._metadata = metadata_of(api_key)
        self._channel = open_channel(address, tls)
        self._router = router_pb2_grpc.RouterStub(self._channel)
        self._admin = router_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Answer a prompt, `messages=[...]` or `prompt_token_ids=[...]`, and wait for the end.

        Sampling is given as keyword arguments (`max_tokens=64`, `temperature=0.0`, ...), as `sampling=`, or both.
        """
        with self.stream(prompt, **options) as stream:
            for _ in stream:
                pass
            return stream.result

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """Like `generate`, in chunks as they arrive. Errors of the server are raised while iterating."""
        ready = _request.build_generate(prompt, options, self._timeout_s)
        return GenerationStream(
            self._router.Generate(ready.message, timeout=ready.timeout_s, metadata=self._metadata),
            self._address,
            ready.n,
        )

    def cancel(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Cancel a request by its id, whoever started it. Whether it was live; an unknown id is no error."""
        message = router_pb2.CancelRequest(request_id=_request.check_request_id(request_id))
        return self._unary(self._router.Cancel, message, timeout_s).found

    def tokenize(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids that `generate` would start from."""
        message = _request.build_tokenize(prompt, messages, model)
        return _request.read_tokens(self._unary(self._router.Tokenize, message, timeout_s))

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelCard, ...]:
        response = self._unary(self._router.ListModels, router_pb2.ListModelsRequest(), timeout_s)
        return tuple(ModelCard.from_proto(card) for card in response.models)

    def status(self, *, timeout_s: float | None = None) -> ClusterStatus:
        """The router's view of its workers."""
        return ClusterStatus.from_proto(self._unary(self._admin.Status, router_pb2.StatusRequest(), timeout_s))

    def recent(self, limit: int = 20, *, timeout_s: float | None = None) -> tuple[Explanation, ...]:
        """The last requests of the router, newest first, each with the pair that was chosen."""
        message = router_pb2.ListRecentRequest(limit=_request.check_limit(limit))
        response = self._unary(self._router.ListRecent, message, timeout_s)
        return tuple(Explanation.from_proto(entry) for entry in response.requests)

    def explain(self, request_id: str, *, timeout_s: float | None = None) -> Explanation:
        """How a recent request was placed, and what happened then. Routers forget old requests."""
        message = router_pb2.ExplainRequest(request_id=_request.check_request_id(request_id))
        return Explanation.from_proto(self._unary(self._router.Explain, message, timeout_s))

    def scale(self, *, wait_s: float = DEFAULT_WAIT_S, **replicas: int) -> ClusterChange:
        """Have so many workers in these pools: `scale(prefill=2, decode=3)`. Waits until it is so, at most `wait_s`.

        Raises `ConfigError` for what cannot be, or where the router belongs to no cluster; `DeadlineExceeded` when the
        time is over and it still goes on.
        """
        message = _request.build_scale(replicas, wait_s)
        response = self._unary(self._admin.Scale, message, wait_s + ANSWER_MARGIN_S)
        return ClusterChange.from_proto(response.change)

    def drain(self, worker: str, *, wait_s: float = DEFAULT_WAIT_S) -> ClusterChange:
        """Take a worker out of service; its pool has one less then. Raises as `scale` does."""
        message = _request.build_drain(worker, wait_s)
        response = self._unary(self._admin.Drain, message, wait_s + ANSWER_MARGIN_S)
        return ClusterChange.from_proto(response.change)

    def flip(self, worker: str, *, wait_s: float = DEFAULT_WAIT_S) -> ClusterChange:
        """Drain a worker, and start one of the other role. Raises as `scale` does."""
        message = _request.build_flip(worker, wait_s)
        response = self._unary(self._admin.Flip, message, wait_s + ANSWER_MARGIN_S)
        return ClusterChange.from_proto(response.change)

    def close(self) -> None:
        """Give the connection back; calls that still run are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(self, method: _Method[RequestT, ResponseT], request: RequestT, timeout_s: float | None) -> ResponseT:
        try:
            return method(request, timeout=_request.check_timeout(timeout_s, self._timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise _status.from_rpc_error(error, self._address) from error
