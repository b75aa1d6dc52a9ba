"""One connected socket that carries frames and raw payload. Knows their lengths, not their meaning.

One thread may send while another receives. Every call has a deadline.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import threading
import time
from array import array
from collections import deque
from contextlib import suppress

from engine.errors import LinkClosed, ProtocolError
from kv_transfer import frames
from kv_transfer.frames import LENGTH_BYTES, MAX_FRAME_BYTES, Frame

_DRAIN_BYTES = 64 * 1024


def set_timeouts(sock: socket.socket, timeout_s: float) -> None:
    """The kernel's own time-outs, not Python's: those make the socket non-blocking, and then a block takes dozens of
    calls where it now takes one. They also keep the two directions apart."""
    sock.settimeout(None)
    seconds, fraction = divmod(timeout_s, 1.0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(fraction * 1e6)))


class FrameSocket:
    """Owns `sock`. All errors are `LinkClosed` (the peer, or its time, is gone) and `ProtocolError` (bad bytes);
    after either the stream has lost its place and is only good for `close`."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(LENGTH_BYTES + MAX_FRAME_BYTES))
        self._start = 0
        self._end = 0
        self._close_lock = threading.Lock()
        self.set_timeout(timeout_s)

    @property
    def is_unix(self) -> bool:
        return self._sock.family == socket.AF_UNIX

    def local_host(self) -> str:
        """Our address, as the peer reaches it. Not of a Unix socket."""
        return str(self._sock.getsockname()[0])

    def peer_user(self) -> int | None:
        """User id of the process that connected or listened, where the kernel vouches for it (Unix socket, Linux)."""
        if sys.platform != "linux" or not self.is_unix:
            return None
        _, uid, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(uid)

    def set_timeout(self, timeout_s: float) -> None:
        """For one frame or payload, once its first byte moved. Not while another thread uses the socket."""
        self._timeout_s = timeout_s
        set_timeouts(self._sock, timeout_s)

    def send(self, encoded: bytes, *payload: memoryview) -> None:
        """Send a frame, and the payload that follows it, completely."""
        deadline = time.monotonic() + self._timeout_s
        parts = deque((memoryview(encoded), *payload))
        try:
            while parts:
                sent = self._sock.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.popleft())
                if parts:
                    parts[0] = parts[0][sent:]
                    self._check(deadline, "sending")
        except OSError as error:
            raise self._closed("sending", error) from error

    def send_now(self, encoded: bytes) -> int:
        """Send as many bytes as go without waiting. Returns how many; the rest is to be sent before anything else."""
        try:
            return self._sock.send(encoded, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._closed("sending", error) from error

    def send_with_fd(self, encoded: bytes, fd: int) -> None:
        """Send a frame with a file descriptor. Unix sockets only, and only as their first frame."""
        try:
            sent = socket.send_fds(self._sock, [encoded], [fd])
        except OSError as error:
            raise self._closed("sending", error) from error
        if sent != len(encoded):
            raise LinkClosed("the first frame does not fit into the socket's buffer")

    def receive(self) -> Frame | None:
        """The next frame, or None if none began within the time-out."""
        deadline = None
        while (frame := self._take()) is None:
            if deadline is None and self._start < self._end:
                deadline = time.monotonic() + self._timeout_s
            if deadline is not None:
                self._check(deadline, "receiving a frame")
            self._make_room()
            try:
                got = self._sock.recv_into(self._buffer[self._end :])
            except BlockingIOError:
                if self._start == self._end:
                    return None
                raise LinkClosed(f"the peer stopped in the middle of a frame for {self._timeout_s:g} s") from None
            except OSError as error:
                raise self._closed("receiving", error) from error
            self._arrived(got)
        return frame

    def receive_with_fd(self) -> tuple[Frame | None, int | None]:
        """As `receive`, for the first frame: with the file descriptor that came along, which the caller then owns."""
        fds: list[int] = []
        deadline = time.monotonic() + self._timeout_s
        try:
            while (frame := self._take()) is None:
                self._check(deadline, "receiving a frame")
                self._make_room()
                room = len(self._buffer) - self._end
                data, ancillary, _, _ = self._sock.recvmsg(room, socket.CMSG_LEN(4), socket.MSG_CMSG_CLOEXEC)
                for level, kind, content in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                        fds.extend(array("i", content[: len(content) // 4 * 4]))
                if len(fds) > 1:  # looked at while they come: whoever sends one with each byte fills our table else
                    raise ProtocolError("more than one file descriptor came with a frame")
                self._buffer[self._end : self._end + len(data)] = data
                self._arrived(len(data))
        except (LinkClosed, ProtocolError, OSError) as error:
            for fd in fds:
                os.close(fd)
            if isinstance(error, BlockingIOError):
                return None, None
            if isinstance(error, OSError):
                raise self._closed("receiving", error) from error
            raise
        return frame, fds[0] if fds else None

    def has_frame(self) -> bool:
        """Whether `receive` would return a frame without waiting. A bad length is left for `receive` to find."""
        buffered = self._end - self._start
        if buffered < LENGTH_BYTES:
            return False
        return buffered - LENGTH_BYTES >= int.from_bytes(
            self._buffer[self._start : self._start + LENGTH_BYTES], "little"
        )

    def peer_gone(self) -> bool:
        """Whether the connection has ended, from either side, whatever is still to be received. Does not wait."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def receive_into(self, target: memoryview) -> None:
        """Fill `target` with payload. On an error part of it may be overwritten."""
        deadline = time.monotonic() + self._timeout_s
        done = min(len(target), self._end - self._start)
        target[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(target):
            self._check(deadline, "receiving a payload")
            try:
                got = self._sock.recv_into(target[done:], 0, socket.MSG_WAITALL)
            except OSError as error:
                raise self._closed("receiving a payload", error) from error
            if not got:
                raise LinkClosed("the peer closed the link in the middle of a payload")
            done += got

    def discard(self, length: int) -> None:
        """Read `length` bytes of payload into nowhere."""
        scratch = memoryview(bytearray(min(length, _DRAIN_BYTES)))
        while length:
            piece = scratch[: min(length, _DRAIN_BYTES)]
            self.receive_into(piece)
            length -= len(piece)

    def shut_down(self) -> None:
        """Wake up whoever waits on the socket, from any thread; both directions are over."""
        with self._close_lock, suppress(OSError):  # the peer may have been faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Once no other thread uses the socket."""
        with self._close_lock:
            self._sock.close()

    def _take(self) -> Frame | None:
        if self._end - self._start < LENGTH_BYTES:
            return None
        body = self._start + LENGTH_BYTES
        length = frames.body_length(self._buffer[self._start : body])
        if self._end - body < length:
            return None
        self._start = body + length
        return frames.decode(self._buffer[body : self._start])

    def _arrived(self, got: int) -> None:
        if not got:
            where = "in the middle of a frame" if self._start < self._end else ""
            raise LinkClosed(f"the peer closed the link {where}".rstrip())
        self._end += got

    def _make_room(self) -> None:
        if not self._start:
            return
        buffered = self._end - self._start
        self._buffer[:buffered] = bytes(self._buffer[self._start : self._end])
        self._start, self._end = 0, buffered

    def _check(self, deadline: float, doing: str) -> None:
        if time.monotonic() > deadline:
            raise LinkClosed(f"no end of {doing} within {self._timeout_s:g} s")

    def _closed(self, doing: str, error: OSError) -> LinkClosed:
        if isinstance(error, BlockingIOError):  # what the kernel's time-outs look like
            return LinkClosed(f"no progress {doing} for {self._timeout_s:g} s")
        return LinkClosed(f"{doing} failed: {error.strerror or error}")
