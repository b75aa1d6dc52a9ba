from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from engine.errors import DeadlineExceeded, QueueFull, RequestCancelled, RequestError
from router.admission import Admission, LiveRequest


def test_a_place_is_free_again_however_the_request_ends() -> None:
    admission = Admission(max_live=1)
    with pytest.raises(ZeroDivisionError), admission.admit("a"):
        _ = 1 // 0
    with admission.admit("b"):
        assert admission.live == 1
    admission.check_idle()


def test_one_request_too_many_is_refused_and_takes_no_place() -> None:
    admission = Admission(max_live=1)
    with admission.admit("a"):
        with pytest.raises(QueueFull, match="1 requests are live; the limit of priority 0 is 1"), admission.admit("b"):
            pass
        assert admission.live == 1


def test_the_worse_a_priority_the_sooner_it_is_refused_and_what_was_let_in_stays() -> None:
    admission = Admission(max_live=16)

    def highest_priority_number_let_in() -> int | None:
        for priority in range(8, -9, -1):
            try:
                with admission.admit("probe", priority):
                    return priority
            except QueueFull:
                continue
        return None

    with ExitStack() as places:
        let_in = []
        for number in range(24):
            let_in.append(highest_priority_number_let_in())
            places.enter_context(admission.admit(f"r{number}", priority=-8))
        assert let_in == [8] * 8 + list(range(7, -9, -1))
        assert highest_priority_number_let_in() is None
        assert admission.live == 24


def test_every_priority_has_a_place_where_there_is_one() -> None:
    admission = Admission(max_live=1)
    with admission.admit("a", priority=8):
        assert admission.live == 1


def test_a_live_id_is_refused_even_when_there_is_room() -> None:
    admission = Admission(max_live=2)
    with admission.admit("a"), pytest.raises(RequestError, match="'a' is live already"), admission.admit("a"):
        pass


def test_cancelling_what_is_not_live_is_no_error() -> None:
    assert Admission(max_live=1).cancel("gone") is False


async def test_a_cancel_ends_the_body_where_it_waits() -> None:
    admission = Admission(max_live=1)
    with admission.admit("a") as live:

        async def body() -> None:
            async with live.within(60.0):
                assert admission.cancel("a")
                await asyncio.Event().wait()

        with pytest.raises(RequestCancelled):
            await body()
    admission.check_idle()


async def test_the_first_cause_is_the_one_that_is_told() -> None:
    live = LiveRequest("a")

    async def body() -> None:
        async with live.within(60.0):
            live.abort(QueueFull("slow"))
            live.abort(RequestCancelled("late"))
            await asyncio.Event().wait()

    with pytest.raises(QueueFull, match="slow"):
        await body()
    live.abort(RequestCancelled("much later"))


async def test_an_abort_before_the_body_keeps_it_from_running() -> None:
    live = LiveRequest("a")
    live.abort(RequestCancelled("early"))
    entered = False
    with pytest.raises(RequestCancelled, match="early"):
        async with live.within(60.0):
            entered = True
    assert not entered


async def test_the_deadline_is_a_typed_error() -> None:
    live = LiveRequest("a")

    async def body() -> None:
        async with live.within(0.01):
            assert 0 < live.remaining_s() <= 0.01
            await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        await body()
    assert live.remaining_s() == 0.0


async def test_a_timeout_inside_the_body_is_not_taken_for_the_deadline() -> None:
    live = LiveRequest("a")
    with pytest.raises(TimeoutError):
        async with live.within(60.0):
            raise TimeoutError
