from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.pacing import MAX_AT_ONCE, Pacer

GAP_S = 0.01


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Callable[[], None]]]:
    """What was armed, instead of arming it."""
    armed: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(
        asyncio.BaseEventLoop, "call_later", lambda self, delay, callback, *args: armed.append((delay, callback))
    )
    return armed


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_timer_wakes_all_in_their_order_a_few_in_each_turn(timers: list[Any]) -> None:
    pacer, woken = Pacer(GAP_S), []

    async def stream(number: int) -> None:
        await pacer.wait()
        woken.append(number)

    streams = [asyncio.create_task(stream(number)) for number in range(2 * MAX_AT_ONCE + 1)]
    await turns(2)
    ((delay, beat),) = timers
    assert delay == GAP_S
    beat()
    await turns(1)
    assert woken == list(range(MAX_AT_ONCE))
    await turns(2)
    assert all(stream.done() for stream in streams)
    assert woken == list(range(2 * MAX_AT_ONCE + 1))
    assert len(timers) == 1


async def test_who_comes_after_a_beat_waits_for_the_next_and_one_that_is_cancelled_takes_nobody_along(
    timers: list[Any],
) -> None:
    pacer = Pacer(GAP_S)
    gone, stays = asyncio.create_task(pacer.wait()), asyncio.create_task(pacer.wait())
    await turns(1)
    gone.cancel()
    timers[0][1]()
    late = asyncio.create_task(pacer.wait())
    await turns(3)
    assert gone.cancelled()
    assert stays.done()
    assert not late.done()
    timers[1][1]()
    await turns(2)
    assert late.done()
