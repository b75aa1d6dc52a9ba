"""What `kvrelay demo` shows of an answer, with a scripted router in place of a cluster."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from fake_router import Event, LiveCall, accepted, finished, running_fake_router, tokens
from rich.console import Console

from cluster.demo import Demo
from cluster.processes import ProcessId
from cluster.state import ClusterRecord
from kvrelay.v1 import common_pb2


@pytest.mark.parametrize(
    ("reason", "ending"),
    [
        (common_pb2.FINISH_REASON_LENGTH, "It is\n\nblue … (max_tokens reached)\nroute"),
        (common_pb2.FINISH_REASON_STOP, "It is\n\nblue\nroute"),
    ],
)
async def test_an_answer_ends_without_blank_lines_and_says_if_it_was_cut(
    reason: common_pb2.FinishReason.ValueType, ending: str
) -> None:
    def script(call: LiveCall) -> Iterator[Event]:
        yield accepted()
        yield tokens(0, [1], "It is\n")
        yield tokens(1, [2], "\nblue")
        yield tokens(2, [3], "\n\n")
        yield finished(3, text="\n", reason=reason)

    file = io.StringIO()
    with running_fake_router() as router:
        router.script = script
        await Demo(Console(file=file, width=200), "why?", 3, 0.0)(record(router.address))

    assert ending in file.getvalue()


def record(router_address: str) -> ClusterRecord:
    return ClusterRecord(
        name="demo",
        cluster_id="c",
        process=ProcessId.mine(),
        router_address=router_address,
        model="m",
        ready=True,
        started_at=0.0,
        log_path="",
        ray_address="",
    )
