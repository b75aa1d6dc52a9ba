"""Processes as the operating system knows them: whether one still is who it was, who is ours, and how to end them.

A process id alone says nothing: the kernel gives it to somebody else later. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for ever: no other process equals it, before or after a reboot."""

    pid: int
    birth: str
    """Boot and start time, as exact as the system tells."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Of the process that has `pid` now; None if there is none, or only a zombie."""
        birth = _birth(pid)
        return None if birth is None else cls(pid, birth)

    @classmethod
    def mine(cls) -> ProcessId:
        me = cls.of(os.getpid())
        assert me is not None
        return me

    @property
    def alive(self) -> bool:
        return _birth(self.pid) == self.birth

    def signal(self, number: signal.Signals) -> bool:
        """Send `number` if the process is still this one; whether it was."""
        if self.pid <= 1 or not self.alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    @property
    def resident_bytes(self) -> int:
        """Resident memory, shared pages included; 0 if the process is gone."""
        if not self.alive:
            return 0
        with suppress(psutil.Error):
            return int(psutil.Process(self.pid).memory_info().rss)
        return 0


def _birth(pid: int) -> str | None:
    if _PROC.is_dir():
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name, in parentheses, may itself hold anything.
        fields = stat[stat.rindex(")") + 2 :].split()
        state, start_ticks = fields[0], fields[19]
        return None if state in "ZX" else f"{_boot_id()}:{start_ticks}"
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.3f}"
    except psutil.Error:
        return None


def _boot_id() -> str:
    with suppress(OSError):
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()[:8]
    return "unknown"


def marked(variable: str, value: str) -> list[ProcessId]:
    """Processes of this user whose initial environment has `variable=value`, this process left out."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.environ().get(variable) == value and (identity := ProcessId.of(process.pid)) is not None:
                found.append(identity)
        except psutil.Error:
            continue  # another user's, or gone
        except OSError:
            continue
    return found


async def gone(process: ProcessId) -> None:
    """Return when `process` has ended. Whoever waits brings the deadline."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        if process.alive:  # or the descriptor is another process's
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end(processes: Iterable[ProcessId], number: signal.Signals, timeout_s: float) -> list[ProcessId]:
    """Send `number` to each and wait for their ends; returns those that live on after `timeout_s`."""
    signalled = [process for process in processes if process.signal(number)]
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for process in signalled:
                await gone(process)
    return [process for process in signalled if process.alive]
