from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import TypeVar

import pytest
from factories import EngineHarness, HarnessFactory, make_request
from fakes import expected_output

from engine.engine import Engine, RequestUpdate, StepOutput
from engine.errors import InternalError, QueueFull, WorkerLost
from engine.step_loop import StepLoop

T = TypeVar("T")
WAIT_S = 20.0
"""Longer than any machine needs; only a failing test waits for so long."""


class LoopHarness:
    """A loop around a small engine, what it delivered, and the faults that it reported."""

    def __init__(self, made: EngineHarness, max_pending: int) -> None:
        self.engine = made.engine
        self.model = made.model
        self.faults: list[Exception] = []
        self.fail_delivery = False
        self._updates: list[RequestUpdate] = []
        self._delivered = threading.Condition()
        self.loop = StepLoop(made.engine, self._deliver, on_fault=self._fault, max_pending=max_pending)

    def _deliver(self, output: StepOutput) -> None:
        with self._delivered:
            self._updates += output.updates
            self._delivered.notify_all()
        if self.fail_delivery:
            raise ValueError("cannot deliver")

    def _fault(self, error: Exception) -> None:
        with self._delivered:
            self.faults.append(error)
            self._delivered.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Re-evaluated after each delivery and fault."""
        with self._delivered:
            assert self._delivered.wait_for(condition, WAIT_S), "it did not happen"

    def end_of(self, request_id: str) -> RequestUpdate:
        def ended() -> list[RequestUpdate]:
            updates = [update for update in self._updates if update.request_id == request_id]
            return [update for update in updates if update.finish_reason or update.error]

        self.wait_until(lambda: bool(ended()))
        return ended()[0]

    def output_of(self, request_id: str) -> list[int]:
        self.end_of(request_id)
        return [u.token.token_id for u in self._updates if u.request_id == request_id and u.token is not None]

    def submit(self, prompt: list[int], request_id: str, max_tokens: int = 8) -> Future[None]:
        request = make_request(prompt, request_id=request_id, max_tokens=max_tokens)
        return self.loop.call(lambda engine: engine.submit(request))

    def gate(self) -> threading.Event:
        """Keep the engine thread busy until the event is set, or the test is over."""
        entered, opened = threading.Event(), threading.Event()

        def hold(engine: Engine) -> None:
            entered.set()
            assert opened.wait(WAIT_S)

        self.loop.post(hold)
        assert entered.wait(WAIT_S)
        return opened


def appending(seen: list[T], item: T) -> Callable[[Engine], None]:
    return lambda engine: seen.append(item)


@pytest.fixture
def harness(make_engine: HarnessFactory) -> Iterator[LoopHarness]:
    harness = LoopHarness(make_engine(), max_pending=100)
    harness.loop.start()
    yield harness
    harness.loop.stop(WAIT_S)


def test_a_request_runs_to_its_end_without_further_calls(harness: LoopHarness) -> None:
    harness.submit([1, 2, 3], "r").result(WAIT_S)
    assert harness.output_of("r") == expected_output([1, 2, 3], 8)


def test_everything_runs_on_the_one_engine_thread(harness: LoopHarness) -> None:
    idents = [harness.loop.call(lambda engine: threading.get_ident()).result(WAIT_S) for _ in range(2)]
    assert idents[0] == idents[1] != threading.get_ident()


def test_commands_run_in_the_order_of_posting(harness: LoopHarness) -> None:
    seen: list[int] = []
    for i in range(20):
        harness.loop.post(appending(seen, i))
    harness.loop.call(lambda engine: None).result(WAIT_S)
    assert seen == list(range(20))


def test_a_call_returns_what_its_function_raised(harness: LoopHarness) -> None:
    with pytest.raises(ZeroDivisionError):
        harness.loop.call(lambda engine: 1 // 0).result(WAIT_S)
    assert harness.faults == []


def test_a_call_that_was_cancelled_before_its_turn_is_taken_back(harness: LoopHarness) -> None:
    opened = harness.gate()
    seen: list[int] = []
    future = harness.loop.call(lambda engine: seen.append(1))
    assert future.cancel()
    opened.set()
    harness.loop.call(lambda engine: None).result(WAIT_S)
    assert seen == []


def test_a_fault_of_a_posted_command_is_reported_and_the_loop_goes_on(harness: LoopHarness) -> None:
    harness.loop.post(lambda engine: engine.submit(make_request([600])))
    harness.submit([1], "r")
    assert harness.output_of("r") == expected_output([1], 8)
    assert len(harness.faults) == 1


def test_a_timer_fires_without_traffic(harness: LoopHarness) -> None:
    fired: Future[int] = Future()
    harness.loop.call_at(time.monotonic() + 0.01, lambda engine: fired.set_result(threading.get_ident()))
    assert fired.result(WAIT_S) == harness.loop.call(lambda engine: threading.get_ident()).result(WAIT_S)


def test_timers_fire_by_time_and_then_by_age(harness: LoopHarness) -> None:
    opened = harness.gate()
    seen: list[str] = []
    for when, name in [(2.0, "late"), (1.0, "early"), (1.0, "early too"), (0.5, "first")]:
        harness.loop.call_at(when, appending(seen, name))
    opened.set()
    harness.loop.call(lambda engine: None).result(WAIT_S)
    harness.loop.call(lambda engine: None).result(WAIT_S)
    assert seen == ["first", "early", "early too", "late"]


def test_a_cancelled_timer_does_not_fire(harness: LoopHarness) -> None:
    opened = harness.gate()
    seen: list[str] = []
    timers = [harness.loop.call_at(float(i), appending(seen, str(i))) for i in range(4)]
    for timer in (timers[0], timers[2], timers[2]):
        timer.cancel()
    opened.set()
    harness.loop.call(lambda engine: None).result(WAIT_S)
    harness.loop.call(lambda engine: None).result(WAIT_S)
    assert seen == ["1", "3"]
    timers[1].cancel()


def test_cancelled_timers_do_not_pile_up(harness: LoopHarness) -> None:
    far = time.monotonic() + 3600.0
    for _ in range(1000):  # ten times the limit on pending ones
        harness.loop.call_at(far, lambda engine: None).cancel()
    assert len(harness.loop._timers) <= 1


def test_pending_calls_and_timers_are_bounded(harness: LoopHarness) -> None:
    opened = harness.gate()
    far = time.monotonic() + 3600.0
    for _ in range(100):
        harness.loop.post(lambda engine: None)
        harness.loop.call_at(far, lambda engine: None)
    with pytest.raises(QueueFull, match="the limit is 100"):
        harness.loop.post(lambda engine: None)
    with pytest.raises(QueueFull, match="the limit is 100"):
        harness.loop.call_at(far, lambda engine: None)
    opened.set()


def test_a_model_fault_reaches_the_request_and_the_loop_goes_on(harness: LoopHarness) -> None:
    harness.model.fault = RuntimeError("boom")
    harness.submit([1, 2], "failing")
    assert isinstance(harness.end_of("failing").error, InternalError)
    harness.submit([1, 2], "next")
    assert harness.output_of("next") == expected_output([1, 2], 8)


def test_a_fault_outside_a_batch_fails_every_live_request_and_the_loop_goes_on(
    harness: LoopHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> StepOutput:
        monkeypatch.undo()
        raise KeyError("a bug in the scheduler")

    opened = harness.gate()
    for i in range(3):
        harness.submit([i], f"r{i}")
    monkeypatch.setattr(harness.engine, "step", broken)
    opened.set()
    for i in range(3):
        assert isinstance(harness.end_of(f"r{i}").error, InternalError)
    assert isinstance(harness.faults[0], KeyError)
    harness.submit([5], "next")
    assert harness.output_of("next") == expected_output([5], 8)


def test_a_fault_of_the_receiver_does_not_stop_the_engine(harness: LoopHarness) -> None:
    harness.fail_delivery = True
    harness.submit([1, 2], "r")
    assert harness.output_of("r") == expected_output([1, 2], 8)
    harness.wait_until(lambda: len(harness.faults) == 8)


def test_an_idle_loop_sleeps_until_somebody_calls(harness: LoopHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps: queue.Queue[float | None] = queue.Queue()
    changed = harness.loop._changed
    wait = changed.wait

    def noted_wait(timeout: float | None = None) -> bool:
        sleeps.put(timeout)
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", noted_wait)
    harness.loop.call(lambda engine: None).result(WAIT_S)
    assert sleeps.get(timeout=WAIT_S) is None


def test_invariants_are_checked_once_the_engine_is_idle(harness: LoopHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = threading.Event()
    monkeypatch.setattr(Engine, "check_integrity", lambda engine: checked.set())
    monkeypatch.setattr("engine.step_loop.INTEGRITY_CHECK_AFTER_S", 0.01)
    harness.submit([1], "r", max_tokens=1)
    assert checked.wait(WAIT_S)


def test_stop_fails_the_calls_that_did_not_run(harness: LoopHarness) -> None:
    opened = harness.gate()
    waiting = harness.loop.call(lambda engine: 1)
    taken_back = harness.loop.call(lambda engine: 1)
    taken_back.cancel()
    with pytest.raises(InternalError, match="still in a step"):
        harness.loop.stop(0.01)
    with pytest.raises(WorkerLost):
        waiting.result(WAIT_S)
    with pytest.raises(CancelledError):
        taken_back.result(WAIT_S)
    opened.set()
    harness.loop.stop(WAIT_S)


def test_a_stopped_loop_refuses_everything(harness: LoopHarness) -> None:
    harness.loop.stop(WAIT_S)
    with pytest.raises(WorkerLost):
        harness.loop.post(lambda engine: None)
    with pytest.raises(WorkerLost):
        harness.loop.call(lambda engine: None)
    with pytest.raises(WorkerLost):
        harness.loop.call_at(0.0, lambda engine: None)


def test_a_loop_that_was_never_started_stops(make_engine: HarnessFactory) -> None:
    loop = LoopHarness(make_engine(), max_pending=1).loop
    future = loop.call(lambda engine: None)
    loop.stop(WAIT_S)
    with pytest.raises(WorkerLost):
        future.result(WAIT_S)
