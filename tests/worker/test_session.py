from __future__ import annotations

import asyncio

import grpc
import pytest

from engine.errors import NoFreeBlocks
from kvrelay.v1 import worker_pb2
from worker.session import Session, SessionOver


def ended(request_id: str) -> worker_pb2.SessionResponse:
    return worker_pb2.SessionResponse(ended=worker_pb2.Ended(request_id=request_id))


async def test_messages_come_out_in_order_and_the_newest_load_report_after_them() -> None:
    session = Session("r0", 10)
    session.send_load(worker_pb2.Load(running=1))
    session.send(ended("a"))
    session.send_load(worker_pb2.Load(running=2))
    session.send(ended("b"))

    messages = [await session.next_message() for _ in range(3)]

    assert messages[:2] == [ended("a"), ended("b")]
    assert messages[2].load.running == 2


async def test_a_full_outbox_ends_the_session_and_gives_its_memory_back() -> None:
    session = Session("r0", 2)
    for name in "abc":
        session.send(ended(name))

    with pytest.raises(SessionOver, match="2 messages wait"):
        await session.wait_over()
    assert session.over
    session.send(ended("d"))  # dropped
    waiting = asyncio.ensure_future(session.next_message())
    done, _ = await asyncio.wait({waiting}, timeout=0)
    waiting.cancel()
    assert not done


async def test_the_first_reason_for_an_end_counts() -> None:
    session = Session("r0", 2)
    session.close(grpc.StatusCode.UNAVAILABLE, "first")
    session.close(grpc.StatusCode.OK, "second")

    with pytest.raises(SessionOver, match="first") as caught:
        await session.wait_over()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_error_travels_as_its_class_its_message_and_whether_another_worker_may_do_better() -> None:
    session = Session("r0", 2)
    session.send_ended("a", NoFreeBlocks("none"))
    session.send_ended("b", None)

    failed, finished = [(await session.next_message()).ended for _ in range(2)]

    assert (failed.error, failed.message, failed.retryable) == ("NoFreeBlocks", "none", True)
    assert (finished.error, finished.message, finished.retryable) == ("", "", False)
    assert session.load_due.is_set()
