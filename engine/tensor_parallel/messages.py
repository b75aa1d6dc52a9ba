"""What rank 0 and another rank say to each other: a closed set of messages over a socket pair."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import msgpack
import torch

from engine.batch import ForwardBatch
from engine.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """To a rank, first: what to load."""

    rank: int
    size: int
    model_path: str
    dtype: str
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """From a rank: what it was told before is done. The first one comes when its weights are loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """From a rank that cannot go on, and ends."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """To a rank: all have loaded; the group is built now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """From a rank, by way of rank 0, to all others while the group is built: what Gloo wants them to know."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """To a rank: the pool, whose memory file follows."""

    layout: dict[str, Any]
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """To a rank: compute this batch (`ForwardBatch`). Not answered: a rank that has taken part in the step's last sum
    has written its KV."""

    token_ids: list[int]
    positions: list[int]
    query_starts: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]

    @classmethod
    def of(cls, batch: ForwardBatch) -> Step:
        return cls(
            token_ids=batch.token_ids.tolist(),
            positions=batch.positions.tolist(),
            query_starts=batch.query_starts,
            context_lens=batch.context_lens,
            block_tables=batch.block_tables,
        )

    def batch(self) -> ForwardBatch:
        """Without samples, which are rank 0's."""
        return ForwardBatch(
            token_ids=torch.tensor(self.token_ids, dtype=torch.int64),
            positions=torch.tensor(self.positions, dtype=torch.int64),
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
            sample_rows=[],
        )


Message = Begin | Done | Failed | Join | Told | Pool | Step
_KINDS: Mapping[str, type[Message]] = MappingProxyType(
    {kind.__name__: kind for kind in (Begin, Done, Failed, Join, Told, Pool, Step)}
)


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_ints(value: Any) -> bool:
    return type(value) is list and all(type(item) is int for item in value)


_CHECKS: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "int": _is_int,
        "bytes": lambda value: type(value) is bytes,
        "str": lambda value: type(value) is str,
        "list[int]": _is_ints,
        "list[list[int]]": lambda value: type(value) is list and all(map(_is_ints, value)),
        "dict[str, Any]": lambda value: type(value) is dict,  # `KvLayout.from_wire` judges the rest
    }
)


def encode(message: Message) -> bytes:
    named = {field.name: getattr(message, field.name) for field in fields(message)}
    encoded: bytes = msgpack.packb([type(message).__name__, named])
    return encoded


def decode(data: bytes) -> Message:
    """Raises `ProtocolError` for anything but the encoding of a message."""
    try:
        name, named = msgpack.unpackb(data)
        kind = _KINDS[name]
        expected = {field.name: _CHECKS[str(field.type)] for field in fields(kind)}
        if named.keys() != expected.keys() or not all(check(named[name]) for name, check in expected.items()):
            raise ProtocolError(f"{name} with fields {sorted(named)}, or one of another type than it has")
        return kind(**named)
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"bytes that are no message of a rank: {error!r}") from error


class Channel:
    """One end of the socket pair. One thread at a time sends, and one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Message, fd: int | None = None) -> None:
        """With a descriptor, on request. Raises `OSError`, also after the time-out of the connection."""
        data = encode(message)
        self.connection.sendall(_LENGTH.pack(len(data)) + data)
        if fd is not None:
            socket.send_fds(self.connection, [b"\0"], [fd])

    def receive(self) -> Message | None:
        """None: the other end is gone. Raises `ProtocolError`, `OSError`."""
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes, of at most {MAX_MESSAGE_BYTES}")
        data = self._read(length)
        return None if data is None else decode(data)

    def receive_fd(self) -> int:
        """That which follows a message. It is the caller's."""
        _, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
        if len(descriptors) != 1:
            raise ProtocolError("no descriptor where one was announced")
        return descriptors[0]

    def close(self) -> None:
        self.connection.close()

    def _read(self, length: int) -> bytes | None:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            if not (count := self.connection.recv_into(view)):
                return None
            view = view[count:]
        return bytes(data)
