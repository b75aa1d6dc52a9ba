"""When tokens are let gather. The clock is the test's."""

from __future__ import annotations

import pytest

from engine.block_hash import pack_tokens
from engine.errors import ProtocolError
from engine.sampling_params import SamplingParams
from kvrelay._wire import sampling_to_proto
from kvrelay.v1 import common_pb2, router_pb2
from router.client_stream import STOP, ClientStream, FinishReason
from router.request import GenerationRequest
from router.session import DrawnToken
from router.waterfall import WaterfallRecorder

GAP_S = 0.01


class Letters:
    """A token is a letter."""

    def push(self, token_ids: object) -> str:
        return "".join(map(chr, token_ids))  # type: ignore[call-overload]

    def flush(self) -> str:
        return ""


def drawn(index: int, token_id: int, reason: FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED) -> DrawnToken:
    return index, token_id, reason, None


class Client:
    def __init__(self) -> None:
        params = SamplingParams(seed=1, max_tokens=100)
        request = GenerationRequest(
            request_id="r", prompt=b"\0\0\0\0", params=params, sampling=sampling_to_proto(params)
        )
        self.now = 0.0
        self.messages: list[router_pb2.GenerateResponse] = []
        self.stream = ClientStream(
            request, Letters(), WaterfallRecorder(0.0), self._emit, lambda: self.now, min_gap_s=GAP_S
        )

    async def _emit(self, message: router_pb2.GenerateResponse) -> None:
        self.messages.append(message)

    async def send(self, now: float, count: int = 1) -> float:
        """`count` tokens as one message; returns the pause that is to follow."""
        self.now = now
        for _ in range(count):
            self.stream.accept([drawn(self.stream.log.num_outputs, 97)])
        await self.stream.flush()
        return self.stream.pause_s


async def test_tokens_of_an_output_that_is_slow_enough_never_wait() -> None:
    client = Client()
    assert [await client.send(now * 1.5 * GAP_S) for now in range(1, 6)] == [0.0] * 5


async def test_the_first_two_tokens_do_not_wait_however_fast_they_come() -> None:
    client = Client()
    assert await client.send(1.0) == 0.0
    assert await client.send(1.001) == GAP_S


async def test_a_fast_output_goes_on_gathering() -> None:
    client = Client()
    await client.send(1.0)
    await client.send(1.001)
    assert await client.send(1.001 + GAP_S, count=9) == GAP_S
    assert [message.tokens.text for message in client.messages] == ["a", "a", "a" * 9]


async def test_an_output_that_becomes_slow_stops_gathering() -> None:
    client = Client()
    await client.send(1.0)
    assert await client.send(1.001) == GAP_S
    assert await client.send(1.001 + GAP_S) == 0.0


async def test_tokens_behind_the_one_that_completes_the_output_are_not_taken() -> None:
    client = Client()
    reason = client.stream.accept([drawn(0, 97), drawn(1, 98), drawn(2, 99, STOP), drawn(3, 100)])
    await client.stream.flush()

    assert (reason, client.stream.log.num_outputs) == (STOP, 3)
    assert client.messages[0].tokens == router_pb2.Tokens(text="ab", token_ids=pack_tokens([97, 98, 99]))


async def test_tokens_before_one_out_of_order_are_the_clients() -> None:
    client = Client()
    with pytest.raises(ProtocolError, match="output index 3 came where 2"):
        client.stream.accept([drawn(index, 97 + index) for index in (0, 1, 3)])
    await client.stream.flush()

    assert [message.tokens.text for message in client.messages] == ["ab"]


async def test_a_message_begins_at_the_index_behind_the_one_before() -> None:
    client = Client()
    await client.send(1.0, count=3)
    await client.send(2.0, count=2)

    assert [(m.tokens.index, len(m.tokens.token_ids)) for m in client.messages] == [(0, 12), (3, 8)]
