"""How a client reaches its router: address, TLS, and the key that goes with each call. Touches no network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from engine.errors import ConfigError
from kvrelay._request import channel_options, check_address

Metadata = tuple[tuple[str, str], ...]

_SEND_AGAIN: dict[str, Any] = {
    "maxAttempts": 4,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
}
"""gRPC sends a call again that had no answer yet, if its connection ended, or if the router did not take it because it
stops: the router that took over does. gRPC's own servers end such calls with CANCELLED. Answers of a router that mean
something else forbid it (`kvrelay._status`), and so does a message that has arrived."""
_SENT_AGAIN = [{"service": "kvrelay.v1.Router"}, {"service": "kvrelay.v1.Admin", "method": "Status"}]
"""Not the orders of operators: one that was begun goes on."""
_CONFIG = json.dumps({"methodConfig": [{"name": _SENT_AGAIN, "retryPolicy": _SEND_AGAIN}]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files of a connection over TLS. Without `ca_file`, the authorities that gRPC comes with are trusted."""

    ca_file: str | None = None
    cert_file: str | None = None
    """Of the client, where the router asks for one; with `key_file`."""
    key_file: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("tls: cert_file and key_file are needed both, or none")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises `ConfigError` naming a file that cannot be read."""
        ca, key, cert = (_read(path) for path in (self.ca_file, self.key_file, self.cert_file))
        return grpc.ssl_channel_credentials(ca, key, cert)


def open_channel(address: str, tls: Tls | None) -> grpc.Channel:
    options = _options(address)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=options)


def open_async_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    options = _options(address)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def _options(address: str) -> list[tuple[str, int | str]]:
    return [*channel_options(check_address(address)), ("grpc.service_config", _CONFIG)]


def metadata_of(api_key: str | None) -> Metadata:
    """What goes with each call. Raises `ConfigError`, which does not repeat the key."""
    if api_key is None:
        return ()
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ConfigError("api_key must be printable ASCII without spaces")
    return (("authorization", f"Bearer {api_key}"),)


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {path} cannot be read: {error.strerror}") from error
