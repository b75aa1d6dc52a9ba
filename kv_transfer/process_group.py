"""A torch.distributed process group of exactly two, for the payload of one link. No global world, no store server.

    both   `PairStore`     what the two constructors tell each other goes over the link's own connection
    both   `PairGroup`     sends or receives one group of blocks, by a deadline, straight from and into pool memory
    P      `GroupOutlet`   after the frame that announces blocks, their payload goes through the group; `CardOutlet`:
                           from a pool on a GPU
    D      `GroupIntake`   receives it, in the order of the frames

`PairGroup` knows what every backend has in common; `transport_gloo` and `transport_nccl` know how each of them waits.

A store server of its own (`TCPStore`) would be one more socket that takes bytes from everybody. The connection of the
link is at hand, it belongs to this pair alone, and its peer has proved who it is. A link that is opened again has a
new connection, so nothing of an earlier group can be mistaken for its own.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from engine.errors import LinkClosed, ProtocolError, TransferError
from engine.link_memory import LinkMemory
from kv_transfer.digest import BlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Blocks, Hello, Meet, encode

PREFILL_RANK, DECODE_RANK = 0, 1
_MAX_KEYS = 8
"""That a peer may announce. Gloo has one, NCCL a few."""


class Work(Protocol):
    """What a backend returns for an operation that it began."""

    def wait(self, timeout: timedelta = ...) -> bool: ...

    def is_completed(self) -> bool: ...

    def exception(self) -> object: ...


class Backend(Protocol):
    """What we call of `torch.distributed`'s `Backend`, whose names these are."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Work: ...

    def abort(self) -> None: ...


Post = Callable[[list[torch.Tensor], int, int], Work]
"""(tensors, rank of the peer, tag)"""
Check = Callable[[Sequence[bytes], bytes], None]
"""(what this end has told, what the peer tells). Raises `ProtocolError` if torch must not see that."""
GroupT = TypeVar("GroupT", bound="PairGroup")


class PairStore(Store):
    """The store of one pair: what one end sets, the other gets over `connection`.

    Only while the group is built, by the thread that builds it, which alone uses the connection then. Torch may ask
    for a key again later, from threads of its own: what it has is what there was.
    """

    def __init__(self, connection: FrameSocket, check: Check) -> None:
        super().__init__()
        self._connection: FrameSocket | None = connection
        self._check = check
        self._ours: list[bytes] = []
        self._values: dict[str, bytes] = {}

    def seal(self) -> None:
        """The group is built: the connection carries frames of blocks from here on."""
        self._connection = None

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._ours.append(data)
        if self._connection is not None:
            self._connection.send(encode(Meet(key=key, value=data)))

    def get(self, key: str) -> bytes:
        """Raises `LinkClosed` if the peer does not tell within the time-out of the connection."""
        while key not in self._values:
            self._hear(key)
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _hear(self, wanted: str) -> None:
        if self._connection is None:
            raise LinkClosed(f"the group is built, and nobody has told {wanted}")
        frame = self._connection.receive()
        if frame is None:
            raise LinkClosed("the peer does not take part in building the group")
        if not isinstance(frame, Meet) or frame.key in self._values or len(self._values) >= 2 * _MAX_KEYS:
            raise ProtocolError(f"{type(frame).__name__} while the group is built")
        self._check(self._ours, frame.value)
        self._values[frame.key] = frame.value


def pair_name(hello: Hello) -> str:
    """Of a pair's keys: the same at both ends, and of no other pair."""
    return f"{hello.worker_id}/{hello.incarnation}/{hello.target_worker_id}/{hello.target_incarnation}"


def meet(connection: FrameSocket, pair: str, construct: Callable[[Store], GroupT], check: Check) -> GroupT:
    """`construct` over the store of the pair named so, on both ends at once, each within the connection's time-out.

    `check` sees what the peer tells before torch does. Raises `LinkClosed` with the reason if no group comes of it, and
    `ProtocolError`.
    """
    store = PairStore(connection, check)
    failure: TransferError
    try:
        return construct(PrefixStore(pair, store))
    except RuntimeError as error:  # all that torch raises; what the store raises comes through as it is
        failure = LinkClosed(f"no group with the peer: {first_line(error)}")
    except TransferError as error:
        failure = type(error)(str(error))
    finally:
        store.seal()
    # Anew and out here: the traceback of the first error, or of its cause, would keep the frames of `construct`, and
    # with them the half-built group and its sockets, until the garbage collector takes the link and its error.
    raise failure


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).split("\n")[0]


class PairGroup(ABC):
    """This end of one pair. One thread sends or receives at a time; `abort` may come from any other.

    After an error the group is over, and nobody writes into the slots, or reads the blocks, of that call any more.
    What the slots hold is undefined: they are not to be adopted.
    """

    def __init__(self, backend: Backend, rank: int) -> None:
        self._backend: Backend | None = backend
        self._peer = 1 - rank
        self._abort_lock = threading.Lock()
        self._aborted = threading.Event()
        """Set once the backend's own `abort` has returned."""

    def send(self, blocks: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Raises `LinkClosed` if the peer has not taken all of them by then."""
        self._exchange("send", blocks, timeout_s)

    def receive(self, slots: Sequence[torch.Tensor], timeout_s: float) -> None:
        """Fill `slots` in order. Raises `LinkClosed` if they are not full by then."""
        self._exchange("recv", slots, timeout_s)

    def abort(self) -> None:
        """End the group, from any thread, once. What waits in it comes back as soon as its backend lets it."""
        with self._abort_lock:
            backend = self._backend
            if backend is not None and not self._aborted.is_set():
                try:
                    backend.abort()
                finally:
                    self._aborted.set()

    def close(self) -> None:
        """By the thread that sends or receives: give everything back. Idempotent."""
        self.abort()
        with self._abort_lock:
            self._backend = None

    def _exchange(self, operation: str, tensors: Sequence[torch.Tensor], timeout_s: float) -> None:
        if self._backend is None or self._aborted.is_set():
            raise LinkClosed("the group is over")
        failure = self._attempt(operation, tensors, timeout_s)
        if failure is not None:
            self.close()
            raise LinkClosed(f"the group failed: {failure}")

    def _attempt(self, operation: str, tensors: Sequence[torch.Tensor], timeout_s: float) -> str | None:
        """Why it failed. A text and not the error, whose traceback would keep the operations, and so their use of the
        memory, alive."""
        works: list[Work] = []
        backend = self._backend
        try:
            assert backend is not None, "`_exchange` has looked"
            self._run(backend, getattr(backend, operation), tensors, works, time.monotonic() + timeout_s)
        except (RuntimeError, LinkClosed) as error:
            return first_line(error)
        return None

    @abstractmethod
    def _run(
        self, backend: Backend, post: Post, tensors: Sequence[torch.Tensor], works: list[Work], deadline: float
    ) -> None:
        """Post all, wait for all. Raises `RuntimeError` or `LinkClosed` if they do not end well by `deadline`."""


class GroupOutlet:
    """P's end of a transport whose payload goes through a group."""

    reads_pool = False

    def __init__(self, transport: str, connection: FrameSocket, group: PairGroup, timeout_s: float) -> None:
        self.transport = transport
        self._connection = connection
        self._group = group
        self._timeout_s = timeout_s

    def offset(self, source_block: int) -> None:
        return None

    def send(self, encoded: bytes, sources: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._connection.send(encoded)
        if sources:
            self._group.send([as_tensor(source) for source in sources], self._timeout_s)

    def close(self) -> None:
        self._group.close()


class CardOutlet(GroupOutlet):
    """P's end, where blocks go whole out of a pool on a GPU."""

    reads_pool = True

    def __init__(
        self, transport: str, connection: FrameSocket, group: PairGroup, timeout_s: float, memory: LinkMemory
    ) -> None:
        super().__init__(transport, connection, group, timeout_s)
        self._memory = memory

    def send(self, encoded: bytes, sources: Sequence[memoryview], blocks: Sequence[int]) -> None:
        self._connection.send(encoded)
        if blocks:  # else it is a frame without payload
            with self._memory.in_order():
                self._group.send(self._memory.tensors(blocks), self._timeout_s)


class GroupIntake:
    """D's end."""

    window = None

    def __init__(self, transport: str, group: PairGroup, copier: BlockCopier, timeout_s: float) -> None:
        self.transport = transport
        self._group = group
        self._copier = copier
        self._timeout_s = timeout_s

    def check(self, frame: Blocks) -> str | None:
        if any(entry.offset is not None for entry in frame.entries):
            return "a block names an offset on a link without shared memory"
        return None

    def receive_into(self, frame: Blocks, slots: Sequence[memoryview | None]) -> list[bytes]:
        granted = [slot for slot in slots if slot is not None]
        nowhere = torch.empty(frame.length if len(granted) < len(slots) else 0, dtype=torch.uint8)
        self.receive([nowhere if slot is None else as_tensor(slot) for slot in slots])
        return self._copier.digests(granted)

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """The payload of the blocks of a frame, in their order. Raises `LinkClosed`."""
        self._group.receive(tensors, self._timeout_s)

    def close(self) -> None:
        self._group.close()


def as_tensor(block: memoryview) -> torch.Tensor:
    """The bytes of a block for a backend, no copy."""
    return torch.frombuffer(block, dtype=torch.uint8)
