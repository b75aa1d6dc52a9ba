"""Who called the Admin service, for what, and how it ended. One line a call, and never a key."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler

from engine.errors import ConfigError

logger = logging.getLogger("kvrelay.audit")

FILE_MODE = 0o600


class AuditLog:
    """Writes to the router's log and, as JSON, to a file of its own. A file that was renamed is made anew."""

    def __init__(self, path: str = "") -> None:
        """`path`: of the file, which only its owner may read; empty: there is none. Raises `ConfigError` if it cannot
        be written."""
        self._file: WatchedFileHandler | None = None
        if not path:
            return
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE))
            self._file = WatchedFileHandler(path, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"audit_log: {path} cannot be written: {error.strerror}") from error

    def record(self, *, request_id: str, identity: str, peer: str, call: str, result: str) -> None:
        """`identity`: the tenant's name. `result`: the name of a status. A full disk is told on standard error."""
        logger.info("%s from %s: request %s: %s: %s", identity, peer, request_id, call, result)
        if self._file is None:
            return
        entry = {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": request_id,
            "identity": identity,
            "peer": peer,
            "call": call,
            "result": result,
        }
        self._file.emit(logging.makeLogRecord({"msg": json.dumps(entry), "levelno": logging.INFO}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
