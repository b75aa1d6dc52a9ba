"""The summary says what a reader of a demo asks for, and leaves out what did not happen."""

from __future__ import annotations

from dataclasses import replace

import fake_router
import pytest

from kvrelay.summary import format_bytes, summarize, summarize_route, summarize_waterfall
from kvrelay.types import Generation, Route, Usage, Waterfall
from kvrelay.v1 import router_pb2

ROUTE = Route.from_proto(fake_router.ROUTE)
WATERFALL = Waterfall.from_proto(fake_router.WATERFALL)
GENERATION = Generation(
    request_id="request-1",
    text="Grüße",
    token_ids=(10, 11, 12),
    finish_reason="stop",
    usage=Usage(prompt_tokens=48, completion_tokens=3, cached_tokens=16),
    logprobs=(),
    route=ROUTE,
    waterfall=WATERFALL,
)


def test_a_split_request_is_told_in_seven_lines() -> None:
    assert summarize(GENERATION) == [
        "route     prefill on prefill-0, decode on decode-0",
        "blocks    3 computed, 2 sent, 2 adopted, 1 cached; 3.0 MiB over shm",
        "TTFT      12.5 ms = queue 0.5 + prefill 12.0",
        "2nd token 20.7 ms = first decode step 0.7",
        "decode    48.5 tokens/s",
        "tokens    48 in (16 cached), 3 out, ended by stop",
        "request   request-1",
    ]


def test_a_request_without_prefill_worker_names_one_worker_and_no_transport() -> None:
    route = Route.from_proto(router_pb2.Route(decode_worker="decode-0", attempts=1))
    assert summarize_route(route) == [
        "route     prefill and decode on decode-0",
        "blocks    0 computed, 0 sent, 0 adopted, 0 cached",
    ]


def test_a_second_attempt_and_recomputed_tokens_are_told() -> None:
    where, blocks = summarize_route(replace(ROUTE, attempts=2, recomputed_tokens=32))
    assert where.endswith(", attempt 2")
    assert blocks.endswith("; 32 prompt tokens recomputed by the decode worker")


def test_one_token_has_no_second_and_no_rate() -> None:
    waterfall = Waterfall.from_proto(router_pb2.Waterfall(ttft_us=1500))
    assert summarize_waterfall(waterfall) == ["TTFT      1.5 ms"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1024**2, "1.0 MiB"), (5 * 1024**3, "5.0 GiB")],
)
def test_bytes_are_told_in_the_largest_fitting_unit(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
