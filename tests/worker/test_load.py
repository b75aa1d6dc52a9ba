from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import psutil
import pytest
from roles import make_parts

from engine.engine import Engine, StepOutput
from engine.errors import WorkerLost
from engine.step_loop import StepLoop
from worker.load import LoadReporter


def ignore(output: StepOutput) -> None:
    pass


@pytest.fixture
def engine() -> Engine:
    return make_parts().engine


@pytest.fixture
def step_loop(engine: Engine) -> Iterator[StepLoop]:
    loop = StepLoop(engine, ignore)
    loop.start()
    yield loop
    loop.stop(5)


async def test_a_report_says_what_the_engine_has_now(engine: Engine, step_loop: StepLoop) -> None:
    reporter = LoadReporter(step_loop, engine.stats())
    reporter.errors["NoFreeBlocks"] += 2

    load = await reporter.report()

    assert (load.blocks_free, load.blocks_owned, load.running, load.waiting) == (32, 0, 0, 0)
    assert load.errors == {"NoFreeBlocks": 2}
    assert load.resident_bytes > 0


async def test_a_process_without_free_descriptors_still_has_a_load(
    engine: Engine, step_loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = LoadReporter(step_loop, engine.stats())
    known = (await reporter.report()).resident_bytes

    def no_descriptor(self: psutil.Process) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(psutil.Process, "memory_info", no_descriptor)

    assert (await reporter.report()).resident_bytes == known


async def test_while_a_step_takes_long_the_last_known_state_is_reported_and_after_it_the_new_one(
    engine: Engine, step_loop: StepLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.load.STATS_TIMEOUT_S", 0.01)
    reporter = LoadReporter(step_loop, engine.stats())
    go_on = threading.Event()

    def long_step(engine: Engine) -> None:
        go_on.wait(5)

    step_loop.post(long_step)
    during = await reporter.report()
    go_on.set()
    blocks = step_loop.call(lambda engine: engine._blocks.allocate(3)).result(5)  # the first question was answered
    monkeypatch.setattr("worker.load.STATS_TIMEOUT_S", 5)
    after = await reporter.report()

    assert (during.blocks_owned, after.blocks_owned) == (0, 3)
    step_loop.call(lambda engine: engine._blocks.release(blocks)).result(5)


async def test_without_an_engine_thread_there_is_no_report(engine: Engine, step_loop: StepLoop) -> None:
    reporter = LoadReporter(step_loop, engine.stats())
    step_loop.stop(5)

    with pytest.raises(WorkerLost):
        await reporter.report()
