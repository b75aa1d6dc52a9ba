"""Both clients against a scripted router: every claim holds for the sync and for the async one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, Protocol

import fake_router
import grpc
import pytest
from fake_router import Event, FakeRouter, LiveCall, accepted, events, finished, running_fake_router, tokens

import kvrelay
from kvrelay import (
    AsyncClient,
    Chunk,
    Client,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    Generation,
    InternalError,
    RequestCancelled,
    RequestError,
    UnavailableError,
    _status,
)
from kvrelay.v1 import common_pb2, router_pb2

WAIT_S = 30.0


class Caller(Protocol):
    """One of the two clients, driven from a plain test."""

    def generate(self, address: str, *args: Any, **options: Any) -> Generation: ...
    def stream(self, address: str, *args: Any, **options: Any) -> tuple[list[Chunk], Generation]: ...
    def leave_after(self, chunks: int, address: str, **options: Any) -> EngineError: ...
    def unary(self, address: str, method: str, *args: Any, **options: Any) -> Any: ...


class SyncCaller:
    def generate(self, address: str, *args: Any, **options: Any) -> Generation:
        with Client(address, timeout_s=WAIT_S) as client:
            return client.generate(*args, **options)

    def stream(self, address: str, *args: Any, **options: Any) -> tuple[list[Chunk], Generation]:
        with Client(address, timeout_s=WAIT_S) as client, client.stream(*args, **options) as stream:
            return list(stream), stream.result

    def leave_after(self, chunks: int, address: str, **options: Any) -> EngineError:
        with Client(address, timeout_s=WAIT_S) as client:
            with client.stream("x", **options) as stream:
                for _ in range(chunks):
                    next(stream)
            with pytest.raises(EngineError) as caught:
                _ = stream.result
            assert list(stream) == []
            return caught.value

    def unary(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        with Client(address, timeout_s=WAIT_S) as client:
            return getattr(client, method)(*args, **options)


class AsyncCaller:
    def generate(self, address: str, *args: Any, **options: Any) -> Generation:
        async def run() -> Generation:
            async with AsyncClient(address, timeout_s=WAIT_S) as client:
                return await client.generate(*args, **options)

        return asyncio.run(run())

    def stream(self, address: str, *args: Any, **options: Any) -> tuple[list[Chunk], Generation]:
        async def run() -> tuple[list[Chunk], Generation]:
            async with AsyncClient(address, timeout_s=WAIT_S) as client, client.stream(*args, **options) as stream:
                return [chunk async for chunk in stream], stream.result

        return asyncio.run(run())

    def leave_after(self, chunks: int, address: str, **options: Any) -> EngineError:
        async def run() -> EngineError:
            async with AsyncClient(address, timeout_s=WAIT_S) as client:
                async with client.stream("x", **options) as stream:
                    for _ in range(chunks):
                        await anext(stream)
                with pytest.raises(EngineError) as caught:
                    _ = stream.result
                assert [chunk async for chunk in stream] == []
                return caught.value

        return asyncio.run(run())

    def unary(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        async def run() -> Any:
            async with AsyncClient(address, timeout_s=WAIT_S) as client:
                return await getattr(client, method)(*args, **options)

        return asyncio.run(run())


@pytest.fixture(params=[SyncCaller(), AsyncCaller()], ids=["sync", "async"])
def caller(request: pytest.FixtureRequest) -> Caller:
    caller: Caller = request.param
    return caller


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with running_fake_router() as router:
        yield router


def one_token_then_silence(call: LiveCall) -> Iterator[Event]:
    yield accepted()
    yield tokens(0, [1], "a")
    call.wait_until_over()


def test_an_answer_has_text_tokens_usage_route_and_waterfall(router: FakeRouter, caller: Caller) -> None:
    generation = caller.generate(router.address, "hello", request_id="mine")
    assert generation.text == "Grüße ✓"
    assert generation.token_ids == (10, 11, 12)
    assert generation.finish_reason == "stop"
    assert generation.usage == kvrelay.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
    assert generation.route == kvrelay.Route.from_proto(fake_router.ROUTE)
    assert generation.waterfall == kvrelay.Waterfall.from_proto(fake_router.WATERFALL)
    assert generation.request_id == "mine"


def test_a_stream_yields_what_arrives_and_ends_with_the_whole_answer(router: FakeRouter, caller: Caller) -> None:
    chunks, result = caller.stream(router.address, "hello")
    assert [(c.index, c.token_ids, c.text) for c in chunks] == [
        (0, (10,), "Gr"),
        (1, (11,), ""),
        (2, (12,), "üße"),
        (3, (), " ✓"),
    ]
    assert result.text == "".join(chunk.text for chunk in chunks)


def test_chunks_arrive_before_the_answer_is_complete(router: FakeRouter) -> None:
    seen = threading.Event()

    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        yield tokens(0, [1], "a")
        assert seen.wait(WAIT_S)
        yield finished(1)

    router.script = script
    with Client(router.address) as client, client.stream("x") as stream:
        assert next(stream).text == "a"
        assert stream.request_id == "request-1"
        seen.set()
        assert list(stream) == []
        assert stream.result.text == "a"


def test_logprobs_come_one_a_token(router: FakeRouter, caller: Caller) -> None:
    entry = common_pb2.TokenLogprobs(logprob=-0.5, top=[common_pb2.TopLogprob(token_id=7, logprob=-0.25)])
    router.script = events(accepted(), tokens(0, [1, 2], "ab", [entry, entry]), finished(2))
    generation = caller.generate(router.address, "x", logprobs=1)
    assert generation.logprobs == (kvrelay.TokenLogprobs(-0.5, (kvrelay.TopLogprob(7, -0.25),)),) * 2


def test_several_choices_arrive_mixed_and_end_as_one_answer_each(router: FakeRouter, caller: Caller) -> None:
    router.script = events(
        accepted(),
        tokens(0, [1], "a"),
        tokens(0, [2], "x", choice=1),
        tokens(1, [3], "y", choice=1),
        finished(2, choice=1),
        tokens(1, [4], "b"),
        finished(2),
    )
    chunks, result = caller.stream(router.address, "hello", n=2)
    assert [(chunk.choice, chunk.text) for chunk in chunks] == [(0, "a"), (1, "x"), (1, "y"), (0, "b")]
    assert [(choice.text, choice.token_ids) for choice in result.choices] == [("ab", (1, 4)), ("xy", (2, 3))]
    assert result.text == "ab"
    assert router.requests[0].n == 2


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_a_number_of_choices_that_is_none_is_refused_by_name(router: FakeRouter, caller: Caller, n: Any) -> None:
    with pytest.raises(RequestError, match=r"^n: must be an integer of at least 1"):
        caller.generate(router.address, "hello", n=n)


@pytest.mark.parametrize("chunks", [0, 1])
def test_leaving_a_stream_early_cancels_the_request_at_the_router(
    router: FakeRouter, caller: Caller, chunks: int
) -> None:
    router.script = one_token_then_silence
    error = caller.leave_after(chunks, router.address)
    assert isinstance(error, RequestCancelled)
    if chunks:  # without a chunk, the call may be gone before the router saw it
        assert router.over.get(timeout=WAIT_S).over.is_set()


def test_a_request_whose_time_is_over_ends_at_both_sides(router: FakeRouter, caller: Caller) -> None:
    router.script = one_token_then_silence
    with pytest.raises(DeadlineExceeded, match="DEADLINE_EXCEEDED"):
        caller.generate(router.address, "x", timeout_s=0.2)
    assert router.over.get(timeout=WAIT_S).over.is_set()


async def test_cancelling_the_task_that_waits_cancels_the_request(router: FakeRouter) -> None:
    router.script = one_token_then_silence
    began = asyncio.Event()

    async def consume(client: AsyncClient) -> None:
        async with client.stream("x") as stream:
            async for _ in stream:
                began.set()

    async with AsyncClient(router.address, timeout_s=WAIT_S) as client:
        task = asyncio.create_task(consume(client))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        call = await asyncio.to_thread(router.over.get, timeout=WAIT_S)
    assert call.over.is_set()


def test_a_stream_can_be_closed_from_another_thread(router: FakeRouter) -> None:
    router.script = one_token_then_silence
    with Client(router.address, timeout_s=WAIT_S) as client:
        stream = client.stream("x")
        next(stream)
        closer = threading.Thread(target=stream.close)
        closer.start()
        with pytest.raises((RequestCancelled, StopIteration)):
            next(stream)
        closer.join(WAIT_S)
        with pytest.raises(RequestCancelled):
            _ = stream.result


def test_two_streams_of_one_client_do_not_wait_for_each_other(router: FakeRouter) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield from one_token_then_silence(call) if call.request.prompt == b"slow" else fake_router.answer(call)

    router.script = script
    with Client(router.address) as client, client.stream("slow") as slow:
        next(slow)
        assert client.generate("fast").text == "Grüße ✓"


@pytest.mark.parametrize("cls", sorted(_status._CLASSES.values(), key=str), ids=lambda cls: cls.__name__)
def test_every_typed_error_reaches_the_caller_as_it_was_raised(
    router: FakeRouter, caller: Caller, cls: type[EngineError]
) -> None:
    router.error = cls("top_p", "limit 1") if issubclass(cls, RequestError) else cls("why it failed")
    for call in (lambda: caller.generate(router.address, "x"), lambda: caller.unary(router.address, "status")):
        with pytest.raises(EngineError) as caught:
            call()
        assert type(caught.value) is cls
        assert str(caught.value) == str(router.error)


def test_an_error_after_the_first_token_is_raised_once_and_kept(router: FakeRouter) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        yield tokens(0, [1], "a")
        call.fail(kvrelay.WorkerLost("decode-0 ended"))

    router.script = script
    with Client(router.address) as client, client.stream("x") as stream:
        assert next(stream).text == "a"
        with pytest.raises(kvrelay.WorkerLost, match="decode-0 ended"):
            next(stream)
        assert list(stream) == []
        with pytest.raises(kvrelay.WorkerLost):
            _ = stream.result


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([accepted(), tokens(1, [1], "a")], "token 0 was due, the router sent 1"),
        ([accepted(), tokens(0, [1], "a"), tokens(0, [1], "a")], "token 1 was due, the router sent 0"),
        ([accepted(), tokens(0, [1, 2], "a"), tokens(3, [1], "a")], "token 2 was due, the router sent 3"),
        ([accepted(), tokens(0, [], "a")], "no token at index 0"),
        ([accepted(), accepted()], "accepted the request twice"),
        ([tokens(0, [1], "a")], "tokens before it accepted"),
        ([accepted(""), finished(0)], "without giving its id"),
        ([accepted(), finished(1)], "counted 1 tokens, 0 arrived"),
        ([accepted(), finished(0), finished(0)], "finished after the end"),
        ([accepted(), finished(0, reason=common_pb2.FINISH_REASON_UNSPECIFIED)], "without a finish reason"),
        ([accepted(), tokens(0, [1], "a")], "without a last word"),
        ([accepted(), tokens(0, [1], "a", choice=1)], "tokens of choice 1; 1 were asked for"),
        ([accepted(), finished(0), tokens(0, [1], "a")], "tokens after the end"),
        ([], "without a last word"),
        ([Event()], "does not know"),
        ([accepted(), Event(tokens=router_pb2.Tokens(token_ids=b"\0\0\0"))], "cannot be read"),
        ([accepted(), tokens(0, [1, 2], "a", [common_pb2.TokenLogprobs()])], "1 logprobs came with 2 tokens"),
    ],
)
def test_a_stream_that_breaks_the_protocol_is_an_internal_error(
    router: FakeRouter, caller: Caller, script: list[Event], said: str
) -> None:
    router.script = events(*script)
    with pytest.raises(InternalError, match=said):
        caller.generate(router.address, "x")


def test_a_gap_cancels_the_rest_of_the_request(router: FakeRouter, caller: Caller) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        yield tokens(5, [1], "a")
        call.wait_until_over()

    router.script = script
    with pytest.raises(InternalError, match="token 0 was due"):
        caller.generate(router.address, "x")
    assert router.over.get(timeout=WAIT_S).over.is_set()


def test_a_result_is_not_there_before_the_end(router: FakeRouter) -> None:
    with Client(router.address) as client, client.stream("x") as stream:
        with pytest.raises(RequestError, match="read it to its end first"):
            _ = stream.result


def test_nobody_listening_is_unavailable_and_says_what_to_do(caller: Caller) -> None:
    with running_fake_router() as router:
        address = router.address
    with pytest.raises(UnavailableError) as caught:
        caller.generate(address, "x")
    assert address in str(caught.value)
    assert "kvrelay up" in str(caught.value)


def test_every_call_carries_a_deadline(router: FakeRouter, caller: Caller) -> None:
    left: list[float | None] = []

    def script(call: LiveCall) -> Iterator[Event]:
        left.append(call.context.time_remaining())
        yield from fake_router.answer(call)

    router.script = script
    caller.generate(router.address, "x")
    assert left[0] is not None
    assert left[0] <= WAIT_S + 1.0  # gRPC rounds up what it sends


def test_the_other_calls_return_typed_values(router: FakeRouter, caller: Caller) -> None:
    assert caller.unary(router.address, "cancel", "request-1") is True
    assert caller.unary(router.address, "cancel", "unknown") is False
    assert caller.unary(router.address, "tokenize", "text") == (5, 6, 70_000)
    assert caller.unary(router.address, "models") == (kvrelay.ModelCard("smollm2-135m", 8192, b"\x01\x02"),)
    explanation = caller.unary(router.address, "explain", "request-1")
    (pair,) = explanation.considered
    assert pair.terms == (kvrelay.PriceTerm("queue", 1.5, None), kvrelay.PriceTerm("prefill", 10.0, 12.25))
    assert (pair.affinity_ms, pair.cached_tokens, pair.found_cached_tokens) == (2.5, 48, 32)
    assert [entry.request_id for entry in caller.unary(router.address, "recent", 2)] == ["request-0", "request-1"]
    status = caller.unary(router.address, "status")
    assert [worker.state for worker in status.workers] == ["ready", "lost"]
    assert status.workers[1].errors == {"DigestMismatch": 3}


@pytest.mark.parametrize("client", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address", ["", "8600", "localhost", "host:", ":8600", "h:0", "h:65536", "::1:80", "http://h:1"]
)
def test_an_address_of_another_form_is_refused_at_once(client: type[Client | AsyncClient], address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        client(address)


@pytest.fixture
def empty_server() -> Iterator[str]:
    """The address of a gRPC server without any service."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(grace=None).wait()


def test_a_server_that_is_no_router_is_named_as_such(empty_server: str, caller: Caller) -> None:
    with pytest.raises(InternalError, match=f"UNIMPLEMENTED from {empty_server}.*kvrelay router"):
        caller.unary(empty_server, "status")
