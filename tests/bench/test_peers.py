from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from bench import peers


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer named `echo`, whose environment is this one; its scripts stand in the folder returned."""
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peers, "_SCRIPTS", tmp_path)
    (tmp_path / "echo" / "bin").mkdir(parents=True)
    (tmp_path / "echo" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def test_a_peer_answers_with_the_last_line_that_is_json(installed: Path) -> None:
    (installed / "say.py").write_text("import sys\nprint('hello')\nprint('[1, %s]' % sys.argv[1])\nprint('INFO bye')\n")
    assert peers.ask("echo", "say.py", ["2"]) == [1, 2]


def test_a_peer_that_is_not_installed_is_no_figure(installed: Path) -> None:
    with pytest.raises(peers.PeerMissing, match="nobody is not installed"):
        peers.ask("nobody", "say.py")


def test_a_peer_that_fails_says_why(installed: Path) -> None:
    (installed / "fail.py").write_text("raise SystemExit('no such instruction')\n")
    with pytest.raises(peers.PeerMissing, match="ended with status 1: no such instruction"):
        peers.ask("echo", "fail.py")


def test_a_peer_that_hangs_is_given_up(installed: Path) -> None:
    (installed / "hang.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(peers.PeerMissing, match=r"did not end within 0\.5 s"):
        peers.ask("echo", "hang.py", timeout_s=0.5)


def test_a_peer_that_gives_no_answer_is_no_figure(installed: Path) -> None:
    (installed / "mute.py").write_text("print('INFO bye')\n")
    with pytest.raises(peers.PeerMissing, match="echo gave no answer"):
        peers.ask("echo", "mute.py")


def test_what_a_slow_peer_has_said_in_time_counts(installed: Path) -> None:
    (installed / "slow.py").write_text("import threading\nprint('[1]', flush=True)\nthreading.Event().wait()\n")
    assert peers.ask("echo", "slow.py", timeout_s=1.5) == [1]


def test_nothing_that_a_peer_started_outlives_the_question(installed: Path) -> None:
    child = "import os, threading; print([os.getpid()], flush=True); threading.Event().wait()"
    (installed / "parent.py").write_text(
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}]).wait()\n"
    )
    (pid,) = peers.ask("echo", "parent.py", timeout_s=1.5)
    _, alive = psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10.0)
    assert not alive
