"""The `nccl` transport: payload between two GPUs through a NCCL communicator of the pair.

What decides here is that the process must survive its peer:

- The communicator is made at once, not at the first block, and without blocking (`blocking = 0`): a peer that dies
  meanwhile would otherwise hold this process in C for ever.
- Nobody waits in CUDA or NCCL: completion is polled, so this process's own deadline counts, and so does the end of the
  control connection. No device is ever synchronised.
- A peer that is gone may show as nothing at all over NVLink. At the deadline a watchdog aborts the communicator from
  a thread of its own, because the one that sends may be stuck in NCCL.
- torch must not take the process down for it: TORCH_NCCL_ASYNC_ERROR_HANDLING=0, see `cluster.config`.

All blocks of a group are one NCCL launch. They must be complete in device memory before they are handed over, and the
slots idle: NCCL's stream waits for the current one of the calling thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

import torch
from torch import distributed
from torch._C._distributed_c10d import ErrorType, Store

from engine.errors import LinkClosed
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Hello
from kv_transfer.process_group import Backend, PairGroup, Post, Work, meet, pair_name

_POLL_S = 0.0002
"""Between two looks at an operation that is under way: at 50 GB/s 10 MB pass meanwhile."""


class NcclBackend(Backend, Protocol):
    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Work: ...

    def get_error(self) -> Any: ...


class NcclGroup(PairGroup):
    """`peer_gone` tells whether the control connection has ended."""

    def __init__(self, backend: NcclBackend, rank: int, peer_gone: Callable[[], bool]) -> None:
        super().__init__(backend, rank)
        self._peer_gone = peer_gone

    @classmethod
    def connect(
        cls, store: Store, rank: int, device: torch.device, timeout_s: float, peer_gone: Callable[[], bool]
    ) -> NcclGroup:
        """Meet the peer over `store`. Raises `RuntimeError` or `LinkClosed` if there is no communicator in time."""
        torch.cuda.set_device(device)
        backend = new_backend(store, rank, timeout_s)
        group = cls(backend, rank, peer_gone)
        try:
            with group._aborted_after(timeout_s):
                backend.eager_connect_single_device(device)
        except RuntimeError:
            group.close()
            raise
        if group._aborted.is_set():
            group.close()
            raise LinkClosed(f"no NCCL communicator within {timeout_s:g} s")
        return group

    def _run(
        self, backend: Backend, post: Post, tensors: Sequence[torch.Tensor], works: list[Work], deadline: float
    ) -> None:
        nccl: Any = backend
        with self._aborted_after(deadline - monotonic()):
            nccl._start_coalescing()
            try:
                for tensor in tensors:
                    post([tensor], self._peer, 0)
            finally:
                works.append(nccl._end_coalescing())  # also after an error: or the thread would go on coalescing
            self._poll(nccl, works[0])

    def _poll(self, backend: NcclBackend, work: Work) -> None:
        while not work.is_completed():
            if self._peer_gone():
                raise LinkClosed("the peer closed the link")
            if self._aborted.wait(_POLL_S):
                raise LinkClosed("the communicator was aborted")
        if (error := work.exception()) is not None or (error := backend.get_error()) != ErrorType.SUCCESS:
            raise LinkClosed(f"NCCL: {error}")

    @contextmanager
    def _aborted_after(self, timeout_s: float) -> Iterator[None]:
        """Whatever this thread is stuck in: abort the communicator from another one when the time is over."""
        watchdog = threading.Timer(max(0.0, timeout_s), self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()
            watchdog.join()  # an abort under way has to end before anybody may use the memory again


def join(connection: FrameSocket, hello: Hello, rank: int, timeout_s: float, device: str) -> NcclGroup:
    """With the other end of `connection`, which does the same. Raises `LinkClosed`, `ProtocolError`."""
    return meet(
        connection,
        pair_name(hello),
        lambda store: NcclGroup.connect(store, rank, torch.device(device), timeout_s, connection.peer_gone),
        check_introduction,
    )


def check_introduction(ours: Sequence[bytes], theirs: bytes) -> None:
    """torch compares the length of a communicator's id itself; the rest of it is NCCL's to judge."""


def new_backend(store: Store, rank: int, timeout_s: float) -> NcclBackend:
    """Without a communicator yet. Raises `RuntimeError` if this torch or this machine cannot."""
    process_group: Any = getattr(distributed, "ProcessGroupNCCL", None)
    if process_group is None:
        raise RuntimeError("this torch is built without NCCL")
    options = process_group.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    try:
        backend: NcclBackend = process_group(store, rank, 2, options)
    except ValueError as error:  # no GPU
        raise RuntimeError(str(error)) from error
    return backend
