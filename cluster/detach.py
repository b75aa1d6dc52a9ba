"""`kvrelay up` in the background: starts it in a session of its own and follows it through a pipe until it is ready."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from cluster.config import child_environment, folder_error, make_folder
from cluster.updates import Failed, Listener, Ready, from_line

TAIL_LINES = 20
STOP_TIMEOUT_S = 30.0


def start_detached(arguments: Sequence[str], log_path: Path, tell: Listener) -> Ready | Failed:
    """Run `kvrelay up` with `arguments` in the background; returns when it is ready, or has ended.

    It writes to a new file, which becomes `log_path` once the name of the cluster is its own. `tell` gets its updates
    as they come. If this is interrupted while it waits, the cluster is stopped.
    """
    reader, writer = os.pipe()
    with open(reader) as updates, ExitStack() as stack:
        try:
            log, new_log = stack.enter_context(_new_log(log_path))
            # -P: a folder `cluster` where the user happens to be is not our package.
            command = [sys.executable, "-P", "-m", "cluster", "up", *arguments]
            process = subprocess.Popen(
                [*command, "--updates-fd", str(writer), "--new-log", new_log],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(uuid.uuid4().hex),
                pass_fds=[writer],
                start_new_session=True,
            )
        finally:
            os.close(writer)
        failed = stack.enter_context(ExitStack())
        failed.callback(_stop, process)
        outcome = _follow(updates, tell)
        if isinstance(outcome, Ready):
            failed.pop_all()
            return outcome
        process.wait()
        if outcome is None:
            how = f"exit code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
            outcome = Failed(f"it ended by {how} before it was ready; the last it wrote:\n{tail(log)}")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(log.fileno()), os.stat(log_path)):
                outcome = Failed(f"{outcome.reason}; more in {log_path}")
        return outcome


@contextmanager
def _new_log(log_path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """A file beside `log_path`, removed on the way out unless it was renamed."""
    make_folder(log_path.parent)
    try:
        descriptor, path = tempfile.mkstemp(dir=log_path.parent, prefix=f".{log_path.name}.")
    except OSError as error:
        raise folder_error(log_path.parent, error) from error
    try:
        with open(descriptor, "w+b") as log:
            yield log, path
    finally:
        Path(path).unlink(missing_ok=True)


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


def tail(log: IO[bytes]) -> str:
    """The last lines of a log."""
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-TAIL_LINES:])
