"""The `gloo` transport: payload through a Gloo group of the pair. The CPU's stand-in for `nccl`, which shares all but
the waiting with it; never chosen unless it is named.

Gloo hears nothing of a peer that dies or freezes in the middle of an operation: the waiting side hangs until its own
time-out, which ends the group, and nothing that another thread can call frees it sooner. So each group of blocks is
waited for with what is left of its deadline and not longer, and the end of the control connection, which the kernel
reports at once, is acted upon only after that.

Gloo's own sockets authenticate nobody: whoever can reach them can disturb a link.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from engine.errors import ProtocolError
from engine.gloo import gloo_backend
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Hello
from kv_transfer.process_group import Backend, PairGroup, Post, Work, meet, pair_name

_MAX_NAME_BYTES = 255
_SOCKADDR_BYTES = 128
_ADDRESS_BYTES = _SOCKADDR_BYTES + 8
_PAIRS_BYTES = 16
_LEAST_S = 0.001
"""A time-out of zero means the group's own to Gloo."""


class GlooGroup(PairGroup):
    @classmethod
    def connect(cls, store: Store, rank: int, host: str, timeout_s: float) -> GlooGroup:
        """Meet the peer over `store`; `host` is our address that it can reach. Raises `RuntimeError` if it cannot."""
        return cls(gloo_backend(store, rank, 2, host, timeout_s), rank)

    def _run(
        self, backend: Backend, post: Post, tensors: Sequence[torch.Tensor], works: list[Work], deadline: float
    ) -> None:
        works += [post([tensor], self._peer, 0) for tensor in tensors]
        for work in works:
            work.wait(timedelta(seconds=max(_LEAST_S, deadline - time.monotonic())))


def join(connection: FrameSocket, hello: Hello, rank: int, timeout_s: float) -> GlooGroup:
    """With the other end of `connection`, which does the same. Raises `LinkClosed`, `ProtocolError`."""
    host = connection.local_host()
    return meet(
        connection, pair_name(hello), lambda store: GlooGroup.connect(store, rank, host, timeout_s), check_introduction
    )


def check_introduction(ours: Sequence[bytes], theirs: bytes) -> None:
    """Gloo believes whatever lengths it reads here, and crashes on wrong ones: the peer's introduction must have the
    form of our own, and may differ from it in name and address alone. Raises `ProtocolError`."""
    if len(ours) != 1:
        raise ProtocolError("the peer introduces itself to Gloo before its turn")
    form = _form(ours[0])
    if form is None or _form(theirs) != form:
        raise ProtocolError("what the peer tells about its end of the Gloo group has not the form of ours")


def _form(introduction: bytes) -> tuple[object, ...] | None:
    """All but the name of the host and the address. None if it is none that we know.

    length, name of the host; length, address (`sockaddr_storage`, number); number of each pair. Lengths and numbers
    have 64 bits.
    """
    name = int.from_bytes(introduction[:8], sys.byteorder)
    address = introduction[8 + name + 8 : 8 + name + 8 + _ADDRESS_BYTES]
    rest = introduction[8 + name + 8 + _ADDRESS_BYTES :]
    if name > _MAX_NAME_BYTES or len(address) != _ADDRESS_BYTES or len(rest) != _PAIRS_BYTES:
        return None
    size = int.from_bytes(introduction[8 + name : 8 + name + 8], sys.byteorder)
    family = int.from_bytes(address[:2], sys.byteorder)
    if size != _ADDRESS_BYTES or family not in (socket.AF_INET, socket.AF_INET6):
        return None
    return family, address[_SOCKADDR_BYTES:], rest
