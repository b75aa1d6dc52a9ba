from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import state
from cluster.config import state_dir
from cluster.processes import ProcessId
from engine.errors import ConfigError, UnavailableError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until the test kills it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def record(name: str = "default", process: ProcessId | None = None) -> state.ClusterRecord:
    process = process or ProcessId.mine()
    return state.ClusterRecord(
        name=name,
        cluster_id=f"id-of-{name}",
        process=process,
        router_address="127.0.0.1:8600",
        model="m",
        ready=True,
        started_at=1.0,
        log_path="",
        ray_address="127.0.0.1:1",
        members=(
            state.MemberRecord(member_id="decode-0", role="decode", address="a", incarnation="i", process=process),
            state.MemberRecord(member_id="decode-1", role="decode", address="b", incarnation="j", process=None),
        ),
        ray_processes=(process,),
    )


def test_a_record_is_read_back_as_it_was_written() -> None:
    state.write_record(record())
    assert state.find_running() == record()
    assert state.find_running("default") == record()


def test_a_record_is_readable_by_its_user_only() -> None:
    state.write_record(record())
    assert stat.S_IMODE(state.state_path("default").stat().st_mode) == 0o600


def test_the_record_of_a_dead_process_is_no_cluster_and_stays_for_who_clears_up(child: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(child.pid)
    assert process is not None
    state.write_record(record(process=process))
    assert state.find_running().process == process

    child.kill()
    child.wait()

    assert state.running_record("default") is None
    assert state.running() == []
    assert state.state_path("default").exists()


def test_a_process_that_got_the_pid_of_a_dead_cluster_is_not_taken_for_it() -> None:
    earlier = replace(ProcessId.mine(), birth="an-earlier-boot:1")
    state.write_record(record(process=earlier))
    assert state.running() == []


def test_without_a_cluster_the_error_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"no cluster runs here; start one with `kvrelay up`"):
        state.find_running()
    with pytest.raises(ConfigError, match=r"no cluster 'other' runs here"):
        state.find_running("other")


def test_one_of_several_clusters_must_be_named() -> None:
    state.write_record(record("a"))
    state.write_record(record("b"))
    with pytest.raises(ConfigError, match="several clusters run here: a, b; say which"):
        state.find_running()
    assert state.find_running("b").name == "b"


def test_a_cluster_without_a_router_yet_is_still_starting() -> None:
    state.write_record(replace(record(), router_address="", ready=False))
    with pytest.raises(UnavailableError, match="still starting"):
        state.find_running()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 99}', '{"version": 1, "name": "default"}'])
def test_a_damaged_record_is_no_cluster(content: str) -> None:
    state_dir().mkdir(parents=True, exist_ok=True)
    state.state_path("default").write_text(content)
    assert state.running() == []


def test_a_record_that_another_run_replaced_is_not_removed() -> None:
    state.write_record(record())
    state.remove_record("default", "id-of-an-earlier-run")
    assert state.find_running() == record()


def test_a_failed_write_leaves_the_old_record_and_nothing_else() -> None:
    state.write_record(record())
    unwritable = replace(record(), model=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        state.write_record(unwritable)
    assert state.find_running() == record()
    assert os.listdir(state_dir()) == ["default.json"]


def test_two_processes_cannot_own_one_name(child: subprocess.Popen[bytes]) -> None:
    with state.sole_owner("default"):
        state.write_record(record())
        with pytest.raises(ConfigError, match=r"'default' runs already \(process \d+\) and serves 127\.0\.0\.1:8600"):
            with state.sole_owner("default"):
                pass
        with state.sole_owner("other"):
            pass
    with state.sole_owner("default"):
        pass


def test_a_name_that_is_taken_and_not_recorded_yet_tells_the_process() -> None:
    with state.sole_owner("default"):
        state.write_record(record(process=ProcessId(2**22 + 1, "of an earlier run")))
        with pytest.raises(ConfigError, match=rf"'default' runs already \(process {os.getpid()}\) and is starting;"):
            with state.sole_owner("default"):
                pass


def test_no_lock_is_left_however_the_owner_ends() -> None:
    with pytest.raises(ZeroDivisionError), state.sole_owner("default"):
        raise ZeroDivisionError
    assert os.listdir(state_dir()) == []


def test_a_lock_whose_file_was_removed_keeps_nobody_out() -> None:
    with state.sole_owner("default"):
        state.lock_path("default").unlink()
        with state.sole_owner("default"):
            assert state.lock_path("default").read_text() == str(os.getpid())


@pytest.mark.parametrize(
    "use",
    [
        lambda: state.write_record(record()),
        lambda: state.sole_owner("default").__enter__(),
        lambda: state.find_running(),
        lambda: state.find_running("default"),
    ],
)
@pytest.mark.parametrize("in_the_way", ["", "state"])
def test_a_home_that_is_no_folder_is_named_with_what_to_set(
    home: Path, use: Callable[[], object], in_the_way: str
) -> None:
    home.rename(home.with_name("away")) if not in_the_way else None
    (home / in_the_way).write_text("a file")
    with pytest.raises(ConfigError, match=rf"cannot use {home}/state\S*: .*; set KVRELAY_HOME to a folder"):
        use()


def test_the_file_is_plain_json() -> None:
    state.write_record(record())
    data = json.loads(state.state_path("default").read_text())
    assert (data["version"], data["router_address"]) == (state.VERSION, "127.0.0.1:8600")
