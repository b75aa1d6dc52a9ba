"""Workers and a router as plain processes, without Ray, for benchmarks that compare systems."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from engine.errors import InternalError

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0


class LocalSystem:
    """A router over `prefill` prefill workers and `decode` decode workers, each a process of this machine.

    Leaving the context stops every process: first asked, then killed. What they log goes to a temporary file, whose
    end is part of the error if one does not get ready.
    """

    def __init__(self, model: Path, *, prefill: int, decode: int, worker_flags: Sequence[str] = ()) -> None:
        self._model = model
        self._roles = ["decode_worker"] * decode + ["prefill_worker"] * prefill
        self._worker_flags = list(worker_flags)
        self._stack = ExitStack()
        self.router_address = ""
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile("w+"))
            common = ["--model", str(self._model), "--port", "0"]
            workers = [
                spawn(stack, self._log, role, [*common, "--worker-id", f"{role}-{i}", *self._worker_flags])
                for i, role in enumerate(self._roles)
            ]
            addresses = [ready_line(worker, self._log)["address"] for worker in workers]
            flags = [flag for address in addresses for flag in ("--worker", str(address))]
            router = spawn(stack, self._log, "router", [*common, *flags])
            self.router_address = str(ready_line(router, self._log)["address"])
            self.pids = [process.pid for process in (*workers, router)]
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def spawn(stack: ExitStack, log: IO[str], module: str, flags: Sequence[str]) -> subprocess.Popen[str]:
    """`python -m module` until `stack` is left: first asked to end, then killed."""
    process = subprocess.Popen([sys.executable, "-m", module, *flags], stdout=subprocess.PIPE, stderr=log, text=True)
    stack.callback(stop_process, process)
    return process


def ready_line(process: subprocess.Popen[str], log: IO[str]) -> dict[str, Any]:
    """The JSON object that a process prints when it serves. Raises `InternalError` with the end of `log` instead."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        line = process.stdout.readline() if selector.select(READY_TIMEOUT_S) else ""
    if not line:
        log.seek(0)
        raise InternalError(
            f"{process.args!r} ended or was not ready within {READY_TIMEOUT_S:.0f} s: {log.read()[-2000:]}"
        )
    ready: dict[str, Any] = json.loads(line)
    return ready


def stop_process(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_TIMEOUT_S)
    if process.stdout is not None:
        process.stdout.close()
