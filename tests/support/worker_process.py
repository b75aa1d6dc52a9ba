"""Workers as real processes, of a tiny Llama with random weights."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import fakes
import tiny_llama

BOUND_S = 60.0
"""A wait longer than this is a failure. Importing torch takes seconds on a busy machine."""


def make_tiny_model(folder: Path) -> Path:
    """A folder that workers and a router can load: the fake tokenizer, with weights that go with it."""
    fakes.make_model_folder(folder)
    config = replace(tiny_llama.TINY, vocab_size=fakes.VOCAB_SIZE, eos_token_ids=(fakes.EOS_TOKEN_ID,))
    tiny_llama.write_checkpoint(folder, config, tiny_llama.random_tensors(config))
    return folder


class WorkerProcess:
    """`python -m ROLE_worker`. Leaving the context kills it if it still runs."""

    def __init__(self, role: str, model: Path, *flags: str) -> None:
        command = [sys.executable, "-m", f"{role}_worker", "--model", str(model), "--dtype", "float32"]
        command += ["--num-blocks-override", "256", "--block-size", "8", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    @cached_property
    def ready(self) -> dict[str, Any]:
        """The ready line."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], BOUND_S)
        line = self.process.stdout.readline() if readable else ""
        assert line, f"not ready: {self.process.poll()}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> tuple[int, str]:
        """Exit code and standard error, without the log."""
        _, errors = self.process.communicate(timeout=BOUND_S)
        lines = [line for line in errors.splitlines() if " INFO " not in line]
        return self.process.returncode, "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()


def wait_gone(pid: int) -> bool:
    """Whether process `pid`, perhaps not our child, ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        readable, _, _ = select.select([descriptor], [], [], BOUND_S)
        return bool(readable)
    finally:
        os.close(descriptor)
