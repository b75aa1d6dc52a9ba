"""How processes of the system write their logs: a line of text or a JSON object for each record, on standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import MappingProxyType

_NOTHING: Mapping[str, str] = MappingProxyType({})
_fields: ContextVar[Mapping[str, str]] = ContextVar("log_fields", default=_NOTHING)


@contextmanager
def log_fields(**fields: str) -> Iterator[None]:
    """What is logged in the block, or by tasks that begin there, has these fields as well."""
    token = _fields.set({**_fields.get(), **fields})
    try:
        yield
    finally:
        _fields.reset(token)


class JsonFormatter(logging.Formatter):
    """One object a record: time, level, logger, process, message, fields of `log_fields`, `error` with a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **_fields.get(),
            **getattr(record, "fields", _NOTHING),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def log_to_stderr(process: str, log_format: str = "text") -> None:
    """Standard output is for the ready line alone. Once for a process; a second call changes nothing."""
    handler = logging.StreamHandler(sys.stderr)
    text = f"%(asctime)s {process.replace('%', '%%')} %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else logging.Formatter(text))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
