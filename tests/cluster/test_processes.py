from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.processes import ProcessId, end, gone, marked

VARIABLE = "KVRELAY_TEST_MARK"
IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, VARIABLE: f"of-{os.getpid()}"}
    with subprocess.Popen(
        [sys.executable, "-c", IGNORES_TERM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    found = ProcessId.of(process.pid)
    assert found is not None
    return found


def test_a_process_is_who_it_was_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert process.alive
    assert process.resident_bytes > 0
    child.kill()
    child.wait()
    assert not process.alive
    assert process.resident_bytes == 0


def test_a_zombie_has_ended(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    child.kill()
    asyncio.run(asyncio.wait_for(gone(process), 10))
    assert not process.alive
    assert ProcessId.of(child.pid) is None


def test_another_process_with_the_same_pid_is_never_signalled(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    impostor = replace(process, birth="0:0")
    assert not impostor.signal(signal.SIGKILL)
    assert process.alive


def test_end_returns_what_does_not_end(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert asyncio.run(end([process], signal.SIGTERM, 0.05)) == [process]
    assert asyncio.run(end([process], signal.SIGKILL, 10.0)) == []


def test_processes_are_found_by_their_mark(child: subprocess.Popen[bytes]) -> None:
    assert marked(VARIABLE, f"of-{os.getpid()}") == [identity(child)]
    assert marked(VARIABLE, "of-nobody") == []
