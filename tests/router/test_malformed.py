"""Requests that protobuf itself cannot read."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fleet import CONFIG

from engine.errors import RequestError
from kvrelay._status import from_rpc_error
from kvrelay.v1 import router_pb2
from router.malformed import malformed
from router.served_model import ServedModel
from router.server import ADMIN_SERVICE, ROUTER_SERVICE, RouterServer

GENERATE = router_pb2.GenerateRequest.DESCRIPTOR
LATIN_1 = "é".encode("latin-1")


def field(number: int, data: bytes) -> bytes:
    """A length-delimited field on the wire."""
    return bytes([number << 3 | 2, len(data)]) + data


def chat(*messages: tuple[bytes, bytes]) -> bytes:
    """A GenerateRequest with these (role, content) pairs, whatever bytes they are."""
    return field(5, b"".join(field(1, field(1, role) + field(2, content)) for role, content in messages))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (chat((b"user", b"hello"), (b"user", LATIN_1)), "messages[1].content"),
        (chat((LATIN_1, b"hello")), "messages[0].role"),
        (field(1, LATIN_1), "request_id"),
        (field(6, field(5, b"END") + field(5, LATIN_1)), "sampling.stop[1]"),
    ],
)
def test_the_field_that_is_not_utf8_is_named(data: bytes, name: str) -> None:
    error = malformed(data, GENERATE)

    assert (error.field, error.description) == (name, "must be UTF-8")


def test_bytes_that_are_no_message_are_named_as_such() -> None:
    assert str(malformed(b"\xff\xff\xff", GENERATE)) == "request: is not a GenerateRequest message"


@given(st.binary(max_size=64))
def test_no_bytes_break_the_search_for_the_field(data: bytes) -> None:
    assert isinstance(malformed(data, GENERATE), RequestError)


@pytest.fixture
async def address(model: ServedModel) -> AsyncIterator[str]:
    server = RouterServer(replace(CONFIG, workers=()), model)
    yield await server.start()
    server.dispatcher.admission.check_idle()
    await server.stop(1.0)


def unary(channel: grpc.aio.Channel, method: str) -> Any:
    """A call of bytes."""
    return channel.unary_unary(method)


async def test_a_client_that_sends_bad_text_gets_invalid_argument_and_the_field(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_stream(f"/{ROUTER_SERVICE}/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [_ async for _ in call(chat((b"user", LATIN_1)), timeout=5)]

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        error = from_rpc_error(raised.value)
        assert isinstance(error, RequestError)
        assert error.field == "messages[0].content"


async def test_a_unary_call_is_checked_too(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel, f"/{ROUTER_SERVICE}/Tokenize")(field(1, LATIN_1), timeout=5)

        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_of_operators_are_checked_like_those_of_clients(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unary(channel, f"/{ADMIN_SERVICE}/Status")(b"\xff\xff\xff", timeout=5)

    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(from_rpc_error(raised.value)) == "request: is not a StatusRequest message"
