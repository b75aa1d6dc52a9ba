from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import state, takedown
from cluster.config import CLUSTER_ID_VARIABLE, ray_dir, state_dir
from cluster.processes import ProcessId
from engine.errors import ConfigError

Start = Callable[..., ProcessId]

OBEYS = "import signal; signal.signal(signal.SIGTERM, lambda *a: exit(0)); print(flush=True); input()"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that stand for those of a cluster, marked like them if they are to be."""
    with ExitStack() as stack:

        def start_one(code: str, *, mark: str = "") -> ProcessId:
            environment = {**os.environ, CLUSTER_ID_VARIABLE: mark}
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            identity = ProcessId.of(process.pid)
            assert identity is not None
            return identity

        yield start_one


def record(process: ProcessId, name: str = "default") -> state.ClusterRecord:
    made = state.ClusterRecord(
        name=name,
        cluster_id=f"id-of-{name}",
        process=process,
        router_address="127.0.0.1:1",
        model="m",
        ready=True,
        started_at=1.0,
        log_path="",
        ray_address="",
    )
    state.write_record(made)
    return made


def test_a_cluster_that_stops_in_order_is_not_killed(start: Start) -> None:
    up = start(OBEYS)
    record(up)
    assert takedown.take_down(None) == ["default"]
    assert not up.alive
    assert state.read_record("default") is None


def test_what_does_not_stop_is_killed_with_everything_of_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takedown, "STOP_TIMEOUT_S", 0.05)
    up, recorded, marked = start(IGNORES_TERM), start(IGNORES_TERM), start(IGNORES_TERM, mark="id-of-default")
    other = start(IGNORES_TERM, mark="id-of-another")
    member = state.MemberRecord(member_id="decode-0", role="decode", address="a", incarnation="i", process=recorded)
    state.write_record(replace(record(up), members=(member,)))
    ray_dir("default").mkdir(parents=True)

    assert takedown.take_down("default") == ["default"]

    assert [process.alive for process in (up, recorded, marked, other)] == [False, False, False, True]
    assert not ray_dir("default").exists()


def test_a_process_that_got_a_recorded_pid_is_left_alone(start: Start) -> None:
    innocent = start(IGNORES_TERM)
    record(replace(innocent, birth="an-earlier-boot:1"))

    assert takedown.take_down(None) == ["default"]

    assert innocent.alive
    assert state.read_record("default") is None


def test_what_a_killed_cluster_left_is_ended(start: Start) -> None:
    orphan = start(IGNORES_TERM, mark="id-of-default")
    record(ProcessId(2**22 + 1, "gone"))
    takedown.take_down("default")
    assert not orphan.alive


def test_nothing_to_stop_is_no_error() -> None:
    assert takedown.take_down(None) == []
    assert takedown.take_down("default") == []


def test_a_record_that_makes_no_sense_is_cleared_with_what_lies_beside_it() -> None:
    state.state_path("default").parent.mkdir(parents=True)
    state.state_path("default").write_text("{")
    ray_dir("default").mkdir(parents=True)

    assert takedown.take_down("default") == ["default"]

    assert not state.state_path("default").exists()
    assert not ray_dir("default").exists()


def test_a_command_that_only_reads_leaves_what_down_needs_to_find_the_survivors(start: Start) -> None:
    orphan = start(IGNORES_TERM, mark="id-of-default")
    record(ProcessId(2**22 + 1, "gone"))
    ray_dir("default").mkdir(parents=True)
    assert state.running() == []
    assert state.running_record("default") is None

    assert takedown.take_down(None) == ["default"]

    assert not orphan.alive
    assert [path.name for path in state_dir().iterdir() if path.is_file()] == []
    assert not ray_dir("default").exists()


def test_without_a_name_all_dead_clusters_are_cleared_up() -> None:
    record(ProcessId(2**22 + 1, "gone"), "a")
    record(ProcessId(2**22 + 1, "gone"), "b")
    assert takedown.take_down(None) == ["a", "b"]
    assert state.names() == []


@pytest.mark.parametrize("name", ["../../etc", "/etc", "", "A", "a" * 33])
def test_a_name_that_no_cluster_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name must be"):
        takedown.take_down(name)


def test_one_of_several_clusters_must_be_named(start: Start) -> None:
    record(start(OBEYS), "a")
    record(start(OBEYS), "b")
    with pytest.raises(ConfigError, match="several clusters run here: a, b; say which"):
        takedown.take_down(None)
    assert takedown.take_down("a") == ["a"]
    assert takedown.take_down(None) == ["b"]
