"""One port for two routers while one takes over from the other: connections that begin go to the newer one.

With SO_REUSEPORT the kernel spreads connections over all sockets that listen on a port; those that are in the queue of
a socket when it is closed are reset. So the older router must get none for a while before it stops to listen. A program
of one instruction says so to the kernel: of the sockets in the order in which they began to listen, take the second.
Where there is only one, there is no second, and the kernel takes that one. No right is needed. Linux only: elsewhere a
client may have to connect again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import closing

_SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN_CONSTANT = 0x06
"""BPF_RET | BPF_K"""


def prefer_newest(*ports: int) -> bool:
    """Of the sockets that listen on one of `ports`, this process's among them, have the second get what is new.

    Returns whether the kernel does so for every port.
    """
    if sys.platform != "linux":
        return False
    attached = [any(_attach(listener, 1) for listener in _listeners(port)) for port in ports]
    return all(attached)


def _attach(listener: socket.socket, index: int) -> bool:
    program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN_CONSTANT, 0, 0, index))
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, struct.pack("HP", 1, ctypes.addressof(program))
        )
    except OSError:  # a kernel that does not know it
        return False
    return True


def _listeners(port: int) -> Iterator[socket.socket]:
    """This process's, as copies: gRPC does not tell its own."""
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with closing(copy):
            if _listens(copy, port):
                yield copy


def _listens(copy: socket.socket, port: int) -> bool:
    if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
        return False
    return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and copy.getsockname()[1] == port
