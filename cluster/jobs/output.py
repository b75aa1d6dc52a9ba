"""The output file of a batch: append-only, one run at a time, with no torn record before what is appended."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from cluster.jobs.ledger import Record, whole_bytes
from engine.errors import ConfigError

SYNC_EVERY = 64
"""Records between two fsyncs. What a power failure takes is asked for again; a killed process loses nothing."""
_CHUNK = 1 << 20


class Output:
    """A context manager. Raises `ConfigError` if the file cannot be used, or another run writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unsynced = 0

    def __enter__(self) -> Self:
        try:
            self._file = open(self._path, "ab+", buffering=0)  # closed on leaving
        except OSError as error:
            raise ConfigError(f"output: cannot write {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"output: another run writes {self._path}") from None
        self._cut_torn_end()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            os.fsync(self._file.fileno())

    def records(self) -> Iterator[bytes]:
        """Those that are there."""
        with open(self._path, "rb") as file:
            yield from file

    def append(self, record: Record) -> None:
        """Whole, or the process is killed in the middle; then the next run cuts it off.

        Raises `ConfigError` if the disk does not take it.
        """
        data = record.text + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
            self._unsynced += 1
            if self._unsynced >= SYNC_EVERY:
                os.fsync(self._file.fileno())
                self._unsynced = 0
        except OSError as error:
            raise ConfigError(f"output: cannot write {self._path}: {error.strerror}") from error

    def _cut_torn_end(self) -> None:
        end = self._file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _CHUNK)
            self._file.seek(start)
            whole = whole_bytes(self._file.read(end - start))
            if whole or not start:
                self._file.truncate(start + whole)
                return
            end = start
