"""The ends of a link as they were in protocol version 1: they share no code with `kv_transfer`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgpack
import xxhash

HELLO, WELCOME, BLOCK, FINISH, RENEW, ACK = 1, 2, 4, 5, 6, 8
TIMEOUT_S = 20.0


def packed(fields: Sequence[Any]) -> bytes:
    """A frame of version 1."""
    body: bytes = msgpack.packb(fields)
    return len(body).to_bytes(4, "little") + body


class Stream:
    """Frames of version 1 on `sock`, as plain lists."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(TIMEOUT_S)

    def send(self, *fields: Any, payload: bytes = b"") -> None:
        self.sock.sendall(packed(fields) + payload)

    def receive(self) -> list[Any]:
        frame: list[Any] = msgpack.unpackb(self.read(int.from_bytes(self.read(4), "little")))
        return frame

    def read(self, length: int) -> bytes:
        parts = b""
        while len(parts) < length:
            part = self.sock.recv(length - len(parts))
            assert part, "the peer closed the link"
            parts += part
        return parts


def hello(layout: dict[str, Any], fingerprint: bytes, transport: str, num_blocks: int) -> list[Any]:
    """Of `prefill-0` incarnation 1, to `decode-0` incarnation 1."""
    return [HELLO, 1, 1, "prefill-0", "1", "decode-0", "1", fingerprint, layout, transport, num_blocks, []]


def block(ordinal: int, slot: int, content_hash: bytes, payload: bytes, offset: int | None) -> list[Any]:
    """Of ticket `t`, generation 1."""
    digest = xxhash.xxh3_128_digest(payload)
    return [BLOCK, "t", "1", ordinal, slot, 1, content_hash, digest, offset, len(payload)]


class OldReceiver:
    """Accepts one link over TCP, acknowledges each block that comes, and keeps what came until FINISH."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(TIMEOUT_S)
        self.port: int = self._listening.getsockname()[1]
        self.hello: list[Any] = []
        self.frames: list[list[Any]] = []
        self.payloads: list[bytes] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.join(TIMEOUT_S)
        self._listening.close()

    def _run(self) -> None:
        sock, _ = self._listening.accept()
        with sock:
            stream = Stream(sock)
            self.hello = stream.receive()
            stream.send(WELCOME, 1, [])
            while (frame := stream.receive())[0] != FINISH:
                if frame[0] == BLOCK:
                    self.frames.append(frame)
                    self.payloads.append(stream.read(frame[9]))
                    stream.send(ACK, frame[1], [frame[3]])
