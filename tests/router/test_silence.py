from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from router.silence import TICKS, SilenceWatch


class ManualLoop:
    """Of an event loop, what a watch uses. A test says when it runs, and at what time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timer: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *args: Any) -> ManualLoop:
        self.timer = (when, lambda: callback(*args))
        return self

    def cancel(self) -> None:
        self.timer = None

    def run_until(self, now: float) -> None:
        """Awake all the while: every timer runs on time."""
        while self.timer is not None and self.timer[0] <= now:
            self.now = self.timer[0]
            self.run()
        self.now = now

    def sleep_until(self, now: float) -> None:
        """Stuck all the while: a timer that is due runs at the end."""
        self.now = now
        self.run()

    def run(self) -> None:
        timer, self.timer = self.timer, None
        if timer is not None and timer[0] <= self.now:
            timer[1]()
        else:
            self.timer = timer


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ManualLoop:
    loop = ManualLoop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    return loop


def test_silence_is_told_once_after_the_limit(loop: ManualLoop) -> None:
    told: list[float] = []
    with SilenceWatch(6.0, lambda: told.append(loop.now)):
        loop.run_until(100.0)

    assert told == [6.0]


def test_whoever_is_heard_in_time_is_not_silent(loop: ManualLoop) -> None:
    told: list[float] = []
    with SilenceWatch(6.0, lambda: told.append(loop.now)) as watch:
        for now in range(5, 100, 5):
            loop.run_until(float(now))
            watch.heard()
        assert told == []
        loop.run_until(200.0)

    assert len(told) == 1
    assert 95.0 + 6.0 <= told[0] <= 95.0 + 6.0 + 6.0 / TICKS


@pytest.mark.parametrize("slept", [5.0, 7.0, 1000.0])
def test_the_time_in_which_the_loop_slept_is_nobodys_silence(loop: ManualLoop, slept: float) -> None:
    told: list[float] = []
    with SilenceWatch(6.0, lambda: told.append(loop.now)) as watch:
        loop.run_until(2.5)
        loop.sleep_until(2.5 + slept)
        loop.run_until(loop.now + 2.0)
        assert told == []
        watch.heard()
        loop.run_until(loop.now + 5.0)

    assert told == []


def test_a_peer_that_stays_silent_after_the_loop_slept_is_told_of(loop: ManualLoop) -> None:
    told: list[float] = []
    with SilenceWatch(6.0, lambda: told.append(loop.now)):
        loop.sleep_until(50.0)
        loop.run_until(70.0)

    assert told == [56.0]


def test_nothing_is_told_once_the_watch_was_left(loop: ManualLoop) -> None:
    told: list[float] = []
    with SilenceWatch(6.0, lambda: told.append(loop.now)):
        pass
    loop.run_until(100.0)

    assert told == []
