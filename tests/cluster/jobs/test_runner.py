from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.jobs import ledger as ledger_module
from cluster.jobs import runner as runner_module
from cluster.jobs.ledger import Answer, Ask
from cluster.jobs.output import Output
from cluster.jobs.runner import Away, BatchRun, Outcome, Progress, Refused, count_lines, read_lines
from engine.errors import ConfigError, Unauthenticated, UnavailableError


class Router:
    """Answers with what is planned for a custom_id, else with 200."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.planned: dict[str, list[Outcome]] = {}
        self.running = self.most_running = 0
        self.hold: asyncio.Event | None = None

    async def __call__(self, ask: Ask) -> Outcome:
        self.asked[ask.custom_id] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await (self.hold.wait() if self.hold is not None else asyncio.sleep(0))
        finally:
            self.running -= 1
        planned = self.planned.get(ask.custom_id, [])
        return planned.pop(0) if planned else Answer(200, "r", {"for": ask.custom_id})


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "FIRST_PAUSE_S", 0.0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / "in.jsonl"
    lines = [{"custom_id": f"id-{n}", "url": "/v1/completions", "body": {"prompt": "p"}} for n in range(20)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source, tmp_path / "out.jsonl"


def records(output: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({record["line"] for record in found}) == len(found)
    return {record["custom_id"]: record for record in found}


async def test_every_line_is_answered_once_with_a_bounded_number_at_a_time(files: tuple[Path, Path]) -> None:
    router, told = Router(), list[Progress]()
    end = await BatchRun(*files, router, concurrency=3, tell=told.append).run()
    assert (end.done, end.failed, end.found, end.over) == (20, 0, 0, True)
    assert set(router.asked.values()) == {1}
    assert router.most_running == 3
    assert {name: record["response"]["body"]["for"] for name, record in records(files[1]).items()} == {
        f"id-{n}": f"id-{n}" for n in range(20)
    }
    assert [progress.done for progress in told[:20]] == list(range(1, 21))


async def test_a_second_run_asks_for_nothing_again(files: tuple[Path, Path]) -> None:
    await BatchRun(*files, Router()).run()
    before, router = files[1].read_bytes(), Router()
    end = await BatchRun(*files, router).run()
    assert (end.done, end.found, router.asked) == (20, 20, Counter())
    assert files[1].read_bytes() == before


async def test_a_torn_record_is_cut_off_and_its_line_asked_for_again(files: tuple[Path, Path]) -> None:
    await BatchRun(*files, Router()).run()
    files[1].write_bytes(files[1].read_bytes()[:-5])
    router = Router()
    await BatchRun(*files, router).run()
    assert sum(router.asked.values()) == 1
    assert len(records(files[1])) == 20


async def test_a_cancelled_run_leaves_what_it_has_written(files: tuple[Path, Path]) -> None:
    router = Router()
    enough = asyncio.Event()
    running = asyncio.create_task(
        BatchRun(*files, router, concurrency=2, tell=lambda p: enough.set() if p.done >= 5 else None).run()
    )
    await enough.wait()
    running.cancel()
    await asyncio.wait({running})
    done = len(records(files[1]))
    assert 5 <= done < 20
    assert (await BatchRun(*files, Router()).run()).found == done


async def test_a_refusal_for_want_of_room_is_asked_again_and_no_error(files: tuple[Path, Path]) -> None:
    router = Router()
    router.planned = {"id-3": [Refused(0.0), Refused(0.01)], "id-4": [Refused(0.0)]}
    end = await BatchRun(*files, router).run()
    assert (end.done, end.failed, end.refusals) == (20, 0, 3)
    assert (router.asked["id-3"], router.asked["id-4"]) == (3, 2)


async def test_a_router_that_is_away_for_a_while_costs_no_line(files: tuple[Path, Path]) -> None:
    router = Router()
    router.planned = {f"id-{n}": [Away("refused"), Away("broken")] for n in range(20)}
    assert (await BatchRun(*files, router).run()).failed == 0


async def test_a_router_that_stays_away_ends_the_run_with_what_it_has(files: tuple[Path, Path]) -> None:
    router = Router()
    router.planned = {"id-7": [Away("connection refused")] * 100}
    with pytest.raises(UnavailableError, match="away for 0 s: connection refused"):
        await BatchRun(*files, router, concurrency=1, patience_s=0.0).run()
    assert len(records(files[1])) == 7


async def test_a_fault_of_the_router_is_tried_again_and_then_recorded(files: tuple[Path, Path]) -> None:
    fault = Answer(500, "r", {"error": {"message": "fault", "code": "internal_error"}})
    router = Router()
    router.planned = {"id-1": [fault], "id-2": [fault] * 3, "id-3": [Answer(400, "r", {})]}
    end = await BatchRun(*files, router).run()
    assert (end.failed, router.asked["id-1"], router.asked["id-2"], router.asked["id-3"]) == (2, 2, 3, 1)
    assert records(files[1])["id-2"]["error"] == {"code": "internal_error", "message": "fault"}


async def test_what_every_line_would_meet_ends_the_run(files: tuple[Path, Path]) -> None:
    async def send(ask: Ask) -> Outcome:
        raise Unauthenticated("unknown key")

    with pytest.raises(Unauthenticated, match="unknown key"):
        await BatchRun(*files, send).run()


async def test_two_runs_do_not_write_one_output(files: tuple[Path, Path]) -> None:
    with Output(files[1]):
        with pytest.raises(ConfigError, match="another run writes"):
            await BatchRun(*files, Router()).run()


@pytest.mark.parametrize(
    ("source", "output", "what"), [("none", "out.jsonl", "input: cannot read"), ("in.jsonl", ".", "output:")]
)
async def test_files_that_cannot_be_used_are_named(
    files: tuple[Path, Path], source: str, output: str, what: str
) -> None:
    folder = files[0].parent
    with pytest.raises(ConfigError, match=what):
        await BatchRun(folder / source, folder / output, Router()).run()


def test_blank_lines_are_none_and_a_long_one_is_read_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_LINE_BYTES", 8)
    monkeypatch.setattr(ledger_module, "MAX_LINE_BYTES", 8)
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n  \r\n" + b"x" * 100 + b"\nlast")
    assert list(read_lines(path)) == [(1, b"a"), (4, b"x" * 9), (5, b"last")]
    assert count_lines(path) == 3
