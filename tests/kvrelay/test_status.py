"""A typed error comes out of a gRPC call as the class that went in."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from typing import Any, cast

import grpc
import pytest

from engine import errors
from engine.errors import EngineError, InternalError, RequestError
from kvrelay import _status

CLASSES = sorted(_status._CLASSES.values(), key=lambda cls: cls.__name__)
FOREIGN = {
    grpc.StatusCode.CANCELLED: errors.RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CapacityError,
}


def an(cls: type[EngineError], text: str = "the text") -> EngineError:
    return cls("prompt", text) if issubclass(cls, RequestError) else cls(text)


class Failing(grpc.GenericRpcHandler):
    """Answers every call with the status it was last given."""

    status: _status.AbortArguments = (grpc.StatusCode.INTERNAL, "", ())

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_unary_rpc_method_handler(self._abort)

    def _abort(self, _: bytes, context: grpc.ServicerContext) -> bytes:
        code, text, metadata = self.status
        context.set_trailing_metadata(metadata)
        context.abort(code, text)
        raise AssertionError("abort returned")


class Loopback:
    """A failing server and a channel to it."""

    def __init__(self) -> None:
        self.handler = Failing()
        self.server = grpc.server(futures.ThreadPoolExecutor(1))
        self.server.add_generic_rpc_handlers((self.handler,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()
        self.channel = grpc.insecure_channel(self.address)
        self.method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary("/any/Method")

    def call(self, status: _status.AbortArguments) -> grpc.RpcError:
        self.handler.status = status
        with pytest.raises(grpc.RpcError) as caught:
            self.method(b"", timeout=10)
        return caught.value


@pytest.fixture(scope="module")
def loopback() -> Iterator[Loopback]:
    loopback = Loopback()
    yield loopback
    loopback.channel.close()
    loopback.server.stop(grace=None).wait()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_call_restores_the_class_and_the_text(loopback: Loopback, cls: type[EngineError]) -> None:
    error = _status.from_rpc_error(loopback.call(_status.abort_arguments(an(cls))))
    assert type(error) is cls
    assert str(error) == str(an(cls))


def test_the_tree_under_test_is_the_whole_tree() -> None:
    def below(cls: type[EngineError]) -> set[type[EngineError]]:
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__() if sub.__module__ == "engine.errors"))

    assert set(CLASSES) == below(EngineError)


def test_a_request_error_keeps_its_field_and_description(loopback: Loopback) -> None:
    error = _status.from_rpc_error(loopback.call(_status.abort_arguments(RequestError("top_p", "must be in (0, 1]"))))
    assert isinstance(error, RequestError)
    assert (error.field, error.description) == ("top_p", "must be in (0, 1]")


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK], ids=lambda c: c.name)
def test_a_foreign_status_becomes_the_nearest_class_and_names_its_code(
    loopback: Loopback, code: grpc.StatusCode
) -> None:
    error = _status.from_rpc_error(loopback.call((code, "as the proxy said", ())), peer="127.0.0.1:8080")
    assert type(error) is FOREIGN.get(code, InternalError)
    assert str(error).startswith(f"gRPC status {code.name} from 127.0.0.1:8080: as the proxy said")


@pytest.mark.parametrize(
    ("text", "cls"),
    [
        ("SERVER: Received message larger than max (9000000 vs. 8388608)", RequestError),
        ("Received message larger than max (9000000 vs. 8388608)", RequestError),
        ("Stream removed (CLIENT: Received message larger than max (9000000 vs. 8388608))", errors.CapacityError),
    ],
)
def test_a_message_that_grpc_finds_too_large_is_the_sender_s_fault(
    loopback: Loopback, text: str, cls: type[EngineError]
) -> None:
    error = _status.from_rpc_error(loopback.call((grpc.StatusCode.RESOURCE_EXHAUSTED, text, ())))
    assert type(error) is cls
    if cls is RequestError:
        assert str(error) == "request: at most 8388608 bytes in one message, got 9000000"


def test_details_that_are_not_ours_are_a_foreign_status(loopback: Loopback) -> None:
    metadata = ((_status.DETAILS_KEY, b"\xff not a message"),)
    error = _status.from_rpc_error(loopback.call((grpc.StatusCode.UNAVAILABLE, "down", metadata)))
    assert type(error) is errors.UnavailableError
    assert "UNAVAILABLE: down" in str(error)


def test_a_class_of_a_newer_peer_falls_back_to_its_status_code(loopback: Loopback) -> None:
    class RackOnFire(errors.UnavailableError):
        pass

    error = _status.from_rpc_error(loopback.call(_status.abort_arguments(RackOnFire("row 4"))))
    assert type(error) is errors.UnavailableError
    assert "row 4" in str(error)


def test_only_retryable_errors_carry_a_retry_hint(loopback: Loopback) -> None:
    full = loopback.call(_status.abort_arguments(errors.QueueFull("1024 wait"), retry_after_s=0.25))
    bad = loopback.call(_status.abort_arguments(RequestError("prompt", "empty")))
    assert _status.retry_after(full) == 0.25
    assert _status.retry_after(bad) is None


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "漢" * 100_000, "\ud800 half a pair"], ids=["ascii", "cjk", "surrogate"]
)
def test_no_message_is_too_long_or_too_odd_for_the_trailers(loopback: Loopback, text: str) -> None:
    error = _status.from_rpc_error(loopback.call(_status.abort_arguments(RequestError("prompt", text))))
    assert isinstance(error, RequestError)
    assert error.description[:1] in text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_worker_reports_an_error_by_name_and_text(cls: type[EngineError]) -> None:
    error = _status.error_from_name(cls.__name__, str(an(cls)))
    assert type(error) is cls
    assert str(error) == str(an(cls))


def test_an_unknown_name_is_an_internal_error_that_says_it() -> None:
    error = _status.error_from_name("RackOnFire", "row 4")
    assert type(error) is InternalError
    assert str(error) == "RackOnFire: row 4"


async def test_to_end_a_call_that_is_over_is_no_fault() -> None:
    class Over:
        async def abort(self, *_: object) -> None:
            raise grpc.aio.InternalError("core has ended the call")  # whether it has is a race of two processes

    with pytest.raises(asyncio.CancelledError):
        await _status.abort(cast("grpc.aio.ServicerContext[Any, Any]", Over()), errors.DeadlineExceeded("too late"))
