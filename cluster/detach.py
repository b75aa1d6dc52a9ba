"""`kvrelay up` in the background: starts it in a session of its own and follows it through a pipe until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from cluster.config import child_environment
from cluster.updates import Failed, Listener, Ready, from_line

TAIL_LINES = 20
STOP_TIMEOUT_S = 30.0


def start_detached(arguments: Sequence[str], log_path: Path, tell: Listener) -> Ready | Failed:
    """Run `kvrelay up` with `arguments` in the background; returns when it is ready, or has ended.

    `tell` gets its updates as they come. If this is interrupted while it waits, the cluster is stopped.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    reader, writer = os.pipe()
    with open(reader) as updates, open(log_path, "w") as log, ExitStack() as failed:
        try:
            # -P: a folder `cluster` where the user happens to be is not our package.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cluster", "up", *arguments, "--updates-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(uuid.uuid4().hex),
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        failed.callback(_stop, process)
        outcome = _follow(updates, tell)
        if isinstance(outcome, Ready):
            failed.pop_all()
            return outcome
        process.wait()
    if outcome is not None:
        return outcome
    how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
    return Failed(f"it ended by {how} before it was ready; the end of {log_path}:\n{tail(log_path)}")


def _follow(updates: Iterable[str], tell: Listener) -> Ready | Failed | None:
    """Until the first readiness, or the end of the process, which alone holds the pipe's other end."""
    failed = None
    for line in updates:
        update = from_line(line)
        tell(update)
        if isinstance(update, Ready):
            return update
        if isinstance(update, Failed):
            failed = update
    return failed


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Of a process that has ended, this is nothing."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def tail(path: Path) -> str:
    """The last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:])
