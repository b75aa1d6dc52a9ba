"""The name of a log's format, as every process takes it. Here because a spec file is checked without loading gRPC."""

from __future__ import annotations

from engine.errors import ConfigError

LOG_FORMATS = ("text", "json")


def check_log_format(value: str) -> None:
    if value not in LOG_FORMATS:
        raise ConfigError(f"log_format must be one of {', '.join(LOG_FORMATS)}, got {value!r}")
