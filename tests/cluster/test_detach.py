"""`kvrelay up -d` and its like that come to nothing: what they say, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster import state
from cluster.config import state_dir

pytestmark = pytest.mark.processes

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def kvrelay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster", *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_the_second_of_two_that_start_at_once_says_so_and_leaves_the_others_log_alone() -> None:
    with state.sole_owner("default"):
        state.log_path("default").write_text("of the first one")
        second = kvrelay("up", "-d", "--port", "0")
        left = sorted(os.listdir(state_dir()))

    assert second.returncode == 1
    assert second.stderr == (
        f"kvrelay: cluster 'default' runs already (process {os.getpid()}) and is starting; "
        "`kvrelay down default` stops it\n"
    )
    assert state.log_path("default").read_text() == "of the first one"
    assert left == ["default.lock", "default.log"]


@pytest.mark.parametrize("detach", [["-d"], []])
def test_a_cluster_that_could_not_begin_tells_its_reason_once_and_leaves_no_file(detach: list[str]) -> None:
    failed = kvrelay("up", *detach, "--port", "0", "--model", "no-such-model")

    assert failed.returncode == 1
    assert failed.stderr.startswith("kvrelay: model 'no-such-model' not found")
    assert (failed.stdout + failed.stderr).count("not found") == 1
    assert os.listdir(state_dir()) == []


@pytest.mark.parametrize("command", [["up", "-d"], ["up"], ["demo"], ["status"], ["down"], ["pull", "smollm2-135m"]])
def test_a_home_that_is_a_file_is_one_line(home: Path, command: list[str]) -> None:
    home.write_text("a file")
    failed = kvrelay(*command)

    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert str(home) in failed.stderr
    assert "set KVRELAY_HOME" in failed.stderr
