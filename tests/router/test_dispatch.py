from __future__ import annotations

from fake_worker import FakeWorker, expected_output
from router_fleet import Fleet

from kvrelay.v1 import common_pb2

PROMPT = b"hello world"


def pair() -> list[FakeWorker]:
    return [FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")]


async def test_a_split_request_brings_every_token_once_with_usage_and_route(fleet: Fleet) -> None:
    await fleet.start(pair())
    call = fleet.call(PROMPT)
    finished = await call.done()
    assert call.token_ids == expected_output(PROMPT, 6)
    assert call.text == bytes(call.token_ids).decode()
    assert finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (11, 6)
    route = finished.route
    assert (route.prefill_worker, route.decode_worker, route.attempts) == ("p0", "d0", 1)
    assert (route.blocks_computed, route.blocks_adopted, route.bytes_sent, route.transport) == (3, 3, 300, "shm")
    assert route.recomputed_tokens == 0
