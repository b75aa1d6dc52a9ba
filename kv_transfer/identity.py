"""Who a worker is on a link, and where its links are reached. Opens no socket."""

from __future__ import annotations

import os
import secrets
import sys
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path

import msgpack

from engine.errors import ConfigError, ProtocolError
from engine.kv_layout import KvLayout

ADOPT = "adopt"
SHM = "shm"
TCP = "tcp"
NCCL = "nccl"
GLOO = "gloo"
TRANSPORTS = (ADOPT, SHM, NCCL, TCP, GLOO)
"""All that we know, the preferred one first."""
DEFAULT_TRANSPORTS = (SHM, TCP)
MAPPING = (ADOPT, SHM)
"""That read the sender's pool, so on one host, over a Unix socket."""
CONVERTING = (TCP, GLOO)
"""Over which P can send other bytes than those of its pool."""
HOST_ONLY, CARD_ONLY = (ADOPT, GLOO), (NCCL,)
"""For pools in host memory, and for pools on GPUs. The others take both: blocks on a GPU go through pinned memory."""

MAX_ID_BYTES = 128
"""Of a worker id, incarnation or ticket id, in UTF-8."""
FINGERPRINT_BYTES = 32
MAX_ENDPOINT_BYTES = 1024
_HOST_ID_BYTES = 16


def parse_transports(text: str) -> tuple[str, ...]:
    """Names with commas between them. Raises `ConfigError` as `check_transports` does."""
    names = tuple(name.strip() for name in text.split(","))
    check_transports(names)
    return names


def check_transports(names: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless `names` may be what a worker offers."""
    if not names or len(set(names)) != len(names) or not set(names) <= set(TRANSPORTS):
        raise ConfigError(f"kv_transports must name some of {', '.join(TRANSPORTS)}, each once, got {', '.join(names)}")


def possible_transports(names: tuple[str, ...], device: str, adopts: bool) -> tuple[str, ...]:
    """Those of `names` that a worker can offer with a pool on `device`; `adopts`: it lends blocks, or borrows them."""
    impossible = set(CARD_ONLY if device == "cpu" else HOST_ONLY)
    impossible |= set(MAPPING) if sys.platform != "linux" else set()
    impossible |= set() if adopts else {ADOPT}
    return tuple(name for name in names if name not in impossible)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """A worker, as its peers compare it. A restarted worker has a new `incarnation` and is a new peer."""

    worker_id: str
    incarnation: str
    fingerprint: bytes
    """Of the model, 32 bytes."""
    layout: KvLayout

    def __post_init__(self) -> None:
        for name in ("worker_id", "incarnation"):
            if not 0 < len(getattr(self, name).encode()) <= MAX_ID_BYTES:
                raise ConfigError(f"{name} must have 1 to {MAX_ID_BYTES} bytes, got {getattr(self, name)!r}")
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ConfigError(f"fingerprint must be {FINGERPRINT_BYTES} bytes, got {len(self.fingerprint)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEndpoint:
    """Where a decode worker accepts links. Routers carry its encoded form without reading it."""

    host_id: bytes
    """See `host_id()`."""
    unix_name: bytes | None
    """Abstract Unix socket, with its leading zero byte; None where there are none."""
    host: str
    port: int
    transports: tuple[str, ...]
    """That the worker accepts; names that we do not know are of a newer version, and ignored."""

    def encode(self) -> bytes:
        data: bytes = msgpack.packb(list(astuple(self)))
        return data

    @classmethod
    def decode(cls, data: bytes) -> LinkEndpoint:
        """Raises `ProtocolError` naming the field that is out of range."""
        if len(data) > MAX_ENDPOINT_BYTES:
            raise ProtocolError(f"link endpoint has {len(data)} bytes, at most {MAX_ENDPOINT_BYTES} are allowed")
        try:
            fields = msgpack.unpackb(data, max_map_len=0, max_ext_len=0, max_array_len=16)
        except (ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"link endpoint is no msgpack: {error}") from error
        match fields:
            case [
                bytes(host),
                None | bytes() as unix_name,
                str(tcp_host),
                int(port),
                list(transports),
            ] if all(isinstance(name, str) for name in transports):
                pass
            case _:
                raise ProtocolError("link endpoint has not the fields host_id, unix_name, host, port, transports")
        if len(host) != _HOST_ID_BYTES:
            raise ProtocolError(f"link endpoint: host_id must be {_HOST_ID_BYTES} bytes, got {len(host)}")
        if unix_name is not None and (not unix_name.startswith(b"\0") or len(unix_name) > 107):
            raise ProtocolError("link endpoint: unix_name must be an abstract name of at most 107 bytes")
        if isinstance(port, bool) or not 0 < port < 65536:
            raise ProtocolError(f"link endpoint: port must be in [1, 65535], got {port}")
        return cls(host_id=host, unix_name=unix_name, host=tcp_host, port=port, transports=tuple(transports))


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """A decode worker, as a ticket or a router names it."""

    worker_id: str
    incarnation: str
    endpoint: bytes
    """An encoded `LinkEndpoint`."""
    layout: KvLayout | None
    """Of its blocks, if it says."""


def host_id() -> bytes:
    """16 bytes, equal in two processes if and only if one can reach the other's abstract Unix sockets.

    Those live in a network namespace of one boot of one kernel, so that is what is hashed: equal host names, or
    equal addresses behind a translator, prove nothing. Where there is no such thing, a value that equals no other.
    """
    if sys.platform != "linux":
        return secrets.token_bytes(_HOST_ID_BYTES)
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    namespace = os.stat("/proc/self/ns/net")
    text = b"%s/%d/%d" % (boot, namespace.st_dev, namespace.st_ino)
    return sha256(text).digest()[:_HOST_ID_BYTES]
