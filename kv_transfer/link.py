"""How a link begins: which socket, and which transport.

    P       connects to D's endpoint, one attempt for each transport that both have, the preferred one first
    both    handshake                                                                         handshake.py
    both    for `gloo` and `nccl`: build the process group of the pair                        process_group.py

A refusal for the transport's sake leads to the next attempt; any other ends them, as the next would hear the same.
What follows the handshake is in `kv_transfer`, `kv_transfer.sender` and `kv_transfer.receiver`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from engine.cluster_key import ClusterKey
from engine.errors import ConfigError, HandshakeRefused, LinkClosed, ProtocolError
from engine.link_memory import LinkMemory
from engine.peer_windows import PeerWindow
from kv_transfer.digest import BlockCopier
from kv_transfer.frame_socket import FrameSocket, set_timeouts
from kv_transfer.frames import CARD, Blocks, Hello, Refused, clipped, encode
from kv_transfer.handshake import Refusal, RefusalCode, examine, introduce, takes_columns, welcome_to
from kv_transfer.identity import (
    ADOPT,
    CARD_ONLY,
    DEFAULT_TRANSPORTS,
    GLOO,
    HOST_ONLY,
    MAPPING,
    NCCL,
    SHM,
    TCP,
    LinkEndpoint,
    PeerIdentity,
    check_transports,
    host_id,
    possible_transports,
)
from kv_transfer.pool import KvPool
from kv_transfer.transport_adopt import AdoptIntake
from kv_transfer.transport_shm import ShmIntake, ShmOutlet
from kv_transfer.transport_tcp import TcpIntake, TcpOutlet

if TYPE_CHECKING:
    from kv_transfer.process_group import PairGroup

_LANDING_BYTES = 16 * 1024 * 1024
"""Pinned memory of one link on its way to a GPU; a single larger block has its own size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    connect_timeout_s: float = 2.0
    handshake_timeout_s: float = 3.0
    progress_timeout_s: float = 5.0
    """For one frame with its payload, and for the acknowledgement of a block. Then the peer is given up."""
    max_unacked_bytes: int = 64 * 1024 * 1024
    """In flight on one link. Too low: the link idles between blocks. A single larger block is sent alone."""
    max_links: int = 256
    """That one receiver serves at once, handshakes included. One more ends the oldest handshake that is not over."""
    connection: Callable[[socket.socket, float], FrameSocket] = FrameSocket
    """Makes a link's connection of a connected socket and a time-out. Fault injection brings its own (faults.py)."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    """That this worker offers, or uses."""
    ask_loans_s: float = 0.5
    """How often a peer that reads our blocks is asked whether it does still. Too high: they come back late."""
    loan_lease_s: float = 5.0
    """Without an answer for so long, what it has is ours again. A peer that sleeps for longer computes anew."""
    key: ClusterKey | None = None
    """Both ends of a link prove that they know it. None: nobody proves anything."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "handshake_timeout_s",
            "progress_timeout_s",
            "max_unacked_bytes",
            "max_links",
            "ask_loans_s",
            "loan_lease_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        check_transports(self.transports)


class Outlet(Protocol):
    """P's end of a transport."""

    @property
    def transport(self) -> str: ...

    @property
    def reads_pool(self) -> bool:
        """Whether it takes `blocks` out of the pool itself, on a GPU: nobody has their bytes then, nor a digest."""
        ...

    def offset(self, place: int) -> int | None:
        """Where the receiver finds a block's payload: `BlockEntry.offset`."""
        ...

    def send(self, encoded: bytes, sources: Sequence[memoryview], blocks: Sequence[int]) -> None:
        """Send the frame of a group of blocks, and what must follow it. Reads `sources` only until it returns."""
        ...

    def close(self) -> None:
        """Once nobody sends any more. The connection is its link's."""
        ...


class Intake(Protocol):
    """D's end of a transport."""

    @property
    def transport(self) -> str: ...

    @property
    def window(self) -> PeerWindow | None:
        """Where the sender's blocks can be read, on links of `adopt`."""
        ...

    def check(self, frame: Blocks) -> str | None:
        """What is impossible about `frame`, or None."""
        ...

    def receive_into(self, frame: Blocks, slots: Sequence[memoryview | None]) -> list[bytes]:
        """Get the payload of each block of a checked `frame` into its slot; None: pass over it.

        Returns the digest of what each slot, None left out, holds now. All of them, or an error: then the link is over.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OutgoingLink:
    connection: FrameSocket
    outlet: Outlet
    protocol: int
    fell_back: bool
    """A preferred transport was tried and failed."""
    columns: bool = False  # whether `Copies` may be sent


class Landing(Protocol):
    """Where payload goes that the pool cannot take from the wire: its slots are on a GPU."""

    def receive_into(self, frame: Blocks, slots: Sequence[int | None]) -> list[bytes]:
        """As `Intake.receive_into`, with the slots' numbers: they hold the payload when it returns."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class IncomingLink:
    connection: FrameSocket
    intake: Intake
    protocol: int
    peer: Hello
    landing: Landing | None = None
    """None: payload goes straight into the slots."""


def connect(
    identity: PeerIdentity,
    target: tuple[str, str],
    endpoint: LinkEndpoint,
    pool: KvPool,
    settings: LinkSettings,
    opened: Callable[[FrameSocket], None],
    memory: LinkMemory | None = None,
) -> OutgoingLink:
    """P's side, to `target` = (worker id, incarnation). Waits; at most the connect and handshake time-outs.

    `opened` is told of each connection before its handshake, so that another thread can end the wait. `memory`: what
    the link needs of a pool on a GPU.

    Raises `HandshakeRefused` with the reason, `LinkClosed` if nobody answers, `ProtocolError`.
    """
    attempts = _attempts(endpoint, pool, settings)
    if not attempts:
        ours = possible_transports(settings.transports, pool.device, pool.lends)
        raise HandshakeRefused(
            f"no transport in common: our pool is on {pool.device}, which leaves {', '.join(ours) or 'none'}; "
            f"the peer offers {', '.join(endpoint.transports) or 'none'}"
        )
    failure: HandshakeRefused | LinkClosed
    for number, (transport, dial) in enumerate(attempts):
        try:
            sock = dial()
        except OSError as error:
            failure = LinkClosed(f"connecting for {transport} failed: {error.strerror or error}")
            continue
        connection = settings.connection(sock, settings.handshake_timeout_s)
        opened(connection)
        try:
            shared = pool if memory is None or transport not in MAPPING else _Places(memory)
            card = "" if memory is None else memory.card
            hello, welcome = introduce(connection, identity, target, shared, transport, settings.key, card)
            outlet = _outlet(connection, hello, pool, settings, memory)
        except Refusal as refusal:
            connection.close()
            failure = HandshakeRefused(str(refusal))
            if refusal.code != RefusalCode.TRANSPORT:
                break
            continue
        except (HandshakeRefused, LinkClosed, ProtocolError):
            connection.close()
            raise
        connection.set_timeout(settings.progress_timeout_s)
        return OutgoingLink(connection, outlet, welcome.protocol, number > 0, takes_columns(welcome, hello))
    raise failure


def accept(
    connection: FrameSocket, identity: PeerIdentity, kv: KvPool, copier: BlockCopier, settings: LinkSettings
) -> IncomingLink:
    """D's side, on a fresh connection. Waits at most the handshake time-out for each step.

    Raises `Refusal` (the peer was told), `LinkClosed`, `ProtocolError`; the connection is then only good for `close`.
    """
    connection.set_timeout(settings.handshake_timeout_s)
    fd: int | None = None
    try:
        if connection.is_unix:
            hello, fd = connection.receive_with_fd()
        else:
            hello = connection.receive()
        if hello is None:
            raise LinkClosed(f"no HELLO within {settings.handshake_timeout_s:g} s")
        if not isinstance(hello, Hello):
            raise ProtocolError(f"a link begins with HELLO, not {type(hello).__name__}")
        protocol = examine(connection, hello, identity, settings.key)
        memory = kv.link_memory(max(1, _LANDING_BYTES // kv.layout.block_bytes))
        _check_ends(hello, memory)
        welcome = encode(welcome_to(hello, protocol, on_host=memory is None))
        intake = _intake(connection, hello, fd, (kv, copier, settings), welcome)
    except Refusal as refusal:
        with suppress(LinkClosed):  # it has its refusal, or is gone
            connection.send(encode(Refused(code=refusal.code, message=clipped(str(refusal)))))
        raise
    finally:
        if fd is not None:
            os.close(fd)  # the mapping, if there is one, keeps the memory
    connection.set_timeout(settings.progress_timeout_s)
    return IncomingLink(connection, intake, protocol, hello, _landing(intake, memory))


class _Places:
    """Of a pool on a GPU, what a peer on this host maps in its stead."""

    def __init__(self, memory: LinkMemory) -> None:
        self.num_blocks = memory.num_places
        self.fd = memory.fd


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel find out, within about 20 s, that the host at the other end of an idle link is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _attempts(
    endpoint: LinkEndpoint, pool: KvPool, settings: LinkSettings
) -> list[tuple[str, Callable[[], socket.socket]]]:
    name = endpoint.unix_name
    on_host = pool.device == "cpu"
    tcp = partial(_dial_tcp, endpoint.host, endpoint.port, settings.connect_timeout_s)
    possible: dict[str, Callable[[], socket.socket]] = {} if on_host else {NCCL: tcp}  # the preferred one first
    if name is not None and (pool.fd is not None or not on_host) and endpoint.host_id == host_id():
        unix = partial(_dial_unix, name, settings.connect_timeout_s)
        possible |= {ADOPT: unix, SHM: unix} if pool.lends else {SHM: unix}
    possible |= {TCP: tcp, GLOO: tcp} if on_host else {TCP: tcp}
    both = set(endpoint.transports) & set(settings.transports)
    return [(transport, dial) for transport, dial in possible.items() if transport in both]


def _dial_unix(name: bytes, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        set_timeouts(sock, timeout_s)  # the kernel's: with Python's, a full backlog is an error at once
        sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def _dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=timeout_s)
    keep_alive(sock)
    return sock


def _outlet(
    connection: FrameSocket, hello: Hello, pool: KvPool, settings: LinkSettings, memory: LinkMemory | None
) -> Outlet:
    if hello.transport in MAPPING:
        return ShmOutlet(connection, pool.layout.block_bytes, hello.transport)
    if hello.transport == TCP:
        return TcpOutlet(connection)
    from kv_transfer import process_group  # here, as links over shared memory and TCP need no torch

    try:
        group = _group(connection, hello, process_group.PREFILL_RANK, pool, settings)
    except LinkClosed as error:
        raise Refusal(RefusalCode.TRANSPORT, str(error)) from error
    if memory is None:
        return process_group.GroupOutlet(hello.transport, connection, group, settings.progress_timeout_s)
    return process_group.CardOutlet(hello.transport, connection, group, settings.progress_timeout_s, memory)


def _intake(
    connection: FrameSocket,
    hello: Hello,
    fd: int | None,
    ours: tuple[KvPool, BlockCopier, LinkSettings],
    welcome: bytes,
) -> Intake:
    """After `welcome` was sent. Raises `Refusal` before that, `LinkClosed`, `ProtocolError`."""
    kv, copier, settings = ours
    transport = hello.transport
    maps = transport in MAPPING
    if transport not in settings.transports or maps != connection.is_unix or maps != (fd is not None):
        raise Refusal(RefusalCode.TRANSPORT, f"transport {transport!r} is not possible on this socket, or not offered")
    if transport in (TCP, *MAPPING):
        intake: Intake
        if fd is None:
            intake = TcpIntake(connection, copier)
        else:
            try:
                intake = _mapping_intake(transport, fd, hello, kv, copier)
            except HandshakeRefused as error:
                raise Refusal(RefusalCode.TRANSPORT, str(error)) from error
        try:
            connection.send(welcome)
        except LinkClosed:
            intake.close()
            raise
        return intake
    from kv_transfer import process_group

    connection.send(welcome)
    group = _group(connection, hello, process_group.DECODE_RANK, kv, settings)
    return process_group.GroupIntake(transport, group, copier, settings.progress_timeout_s)


def _check_ends(hello: Hello, memory: LinkMemory | None) -> None:
    """`memory`: of our pool, if it is on a GPU. Raises `Refusal` for a transport that one of the pools cannot have."""
    wrong = HOST_ONLY if memory is not None else CARD_ONLY
    if hello.transport in wrong:
        where = "on a GPU" if memory is not None else "in host memory"
        raise Refusal(RefusalCode.TRANSPORT, f"{hello.transport} reaches no pool {where}, and ours is")
    if memory is not None and hello.transport == NCCL and f"{CARD}{memory.card}" in hello.capabilities:
        raise Refusal(RefusalCode.TRANSPORT, f"both pools are on {memory.card}: NCCL connects no two ends on one card")


def _landing(intake: Intake, memory: LinkMemory | None) -> Landing | None:
    if memory is None:
        return None
    from kv_transfer import landing  # it knows groups, and so torch

    return landing.landing_of(intake, memory)


def _mapping_intake(transport: str, fd: int, hello: Hello, kv: KvPool, copier: BlockCopier) -> ShmIntake:
    if transport == SHM:
        return ShmIntake(fd, hello.num_blocks, kv.layout.block_bytes, copier)
    if kv.windows is None:
        raise HandshakeRefused("this pool has no windows to show another's blocks in")
    return AdoptIntake(fd, hello.num_blocks, kv.layout.block_bytes, copier, kv.windows)


def _group(connection: FrameSocket, hello: Hello, rank: int, pool: KvPool, settings: LinkSettings) -> PairGroup:
    if hello.transport == GLOO:
        from kv_transfer import transport_gloo

        return transport_gloo.join(connection, hello, rank, settings.handshake_timeout_s)
    from kv_transfer import transport_nccl

    return transport_nccl.join(connection, hello, rank, settings.handshake_timeout_s, pool.device)


def import_groups(settings: LinkSettings) -> None:
    """What the first link over `gloo` or `nccl` would import: torch alone takes longer than a handshake may."""
    if {GLOO, NCCL} & set(settings.transports):
        for module in ("transport_gloo", "transport_nccl"):
            import_module(f"kv_transfer.{module}")
