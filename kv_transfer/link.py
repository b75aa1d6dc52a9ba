"""How a link begins: which socket, which transport, and whether the two ends may exchange blocks at all.

    P  connects to D's endpoint, one attempt for each transport that both have, the preferred one first
    P  HELLO ->     protocol versions, who P is, whom it wants, model fingerprint, KV layout, transport;
                    for `shm` with a descriptor of P's pool, through which only reading is possible
    D  <- WELCOME   the agreed version;  or  <- REFUSED with a code and a reason, and the end of the stream

A refusal for the transport's sake leads to the next attempt; any other ends them, as the next would hear the same.
What follows the handshake is in `kv_transfer`, `kv_transfer.sender` and `kv_transfer.receiver`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from engine.errors import ConfigError, HandshakeRefused, LinkClosed, ProtocolError
from engine.kv_layout import KvLayout
from kv_transfer.conversion import compatible
from kv_transfer.digest import BlockCopier
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import (
    CONVERTS,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Blocks,
    Hello,
    Refused,
    Welcome,
    clipped,
    encode,
)
from kv_transfer.identity import SHM, TCP, LinkEndpoint, PeerIdentity, host_id
from kv_transfer.pool import KvPool
from kv_transfer.transport_shm import ShmIntake, ShmOutlet, read_only
from kv_transfer.transport_tcp import TcpIntake, TcpOutlet


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    connect_timeout_s: float = 2.0
    handshake_timeout_s: float = 3.0
    progress_timeout_s: float = 5.0
    """For one frame with its payload, and for the acknowledgement of a block. Then the peer is given up."""
    max_unacked_bytes: int = 64 * 1024 * 1024
    """In flight on one link. Too low: the link idles between blocks. A single larger block is sent alone."""
    max_links: int = 256
    """That one receiver serves at once, handshakes included."""
    connection: Callable[[socket.socket, float], FrameSocket] = FrameSocket
    """Makes a link's connection of a connected socket and a time-out. Fault injection brings its own (faults.py)."""

    def __post_init__(self) -> None:
        for name in (
            "connect_timeout_s",
            "handshake_timeout_s",
            "progress_timeout_s",
            "max_unacked_bytes",
            "max_links",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


class RefusalCode(StrEnum):
    PROTOCOL = "protocol"
    """No version in common."""
    IDENTITY = "identity"
    """The worker that P wants is not here, or not any more."""
    FINGERPRINT = "fingerprint"
    """Another model."""
    LAYOUT = "layout"
    TRANSPORT = "transport"
    """This transport does not work between us; another may."""


class Refusal(HandshakeRefused):
    """With what the two ends of a handshake need beside the reason: its kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = str(code)


class Outlet(Protocol):
    """P's end of a transport."""

    @property
    def transport(self) -> str: ...

    def offset(self, source_block: int) -> int | None:
        """Where the receiver finds a block's payload: `BlockEntry.offset`."""
        ...

    def send(self, encoded: bytes, sources: Sequence[memoryview]) -> None:
        """Send the frame of a group of blocks, and what must follow it. Reads `sources` only until it returns."""
        ...


class Intake(Protocol):
    """D's end of a transport."""

    @property
    def transport(self) -> str: ...

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


@dataclass(frozen=True, slots=True)
class IncomingLink:
    connection: FrameSocket
    intake: Intake
    protocol: int
    peer: Hello


def connect(
    identity: PeerIdentity,
    target: tuple[str, str],
    endpoint: LinkEndpoint,
    pool: KvPool,
    settings: LinkSettings,
    opened: Callable[[FrameSocket], None],
) -> OutgoingLink:
    """P's side, to `target` = (worker id, incarnation). Waits; at most the connect and handshake time-outs.

    `opened` is told of each connection before its handshake, so that another thread can end the wait.

    Raises `HandshakeRefused` with the reason, `LinkClosed` if nobody answers, `ProtocolError`.
    """
    attempts = _attempts(endpoint, pool, settings)
    if not attempts:
        raise HandshakeRefused(f"no transport in common: the peer offers {', '.join(endpoint.transports) or 'none'}")
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
            protocol = _introduce(connection, identity, target, pool, transport)
        except Refusal as refusal:
            connection.close()
            failure = HandshakeRefused(str(refusal))
            if refusal.code != RefusalCode.TRANSPORT:
                break
            continue
        except (LinkClosed, ProtocolError):
            connection.close()
            raise
        connection.set_timeout(settings.progress_timeout_s)
        outlet = ShmOutlet(connection, pool.layout.block_bytes) if transport == SHM else TcpOutlet(connection)
        return OutgoingLink(connection, outlet, protocol, fell_back=number > 0)
    raise failure


def accept(
    connection: FrameSocket, identity: PeerIdentity, copier: BlockCopier, settings: LinkSettings
) -> IncomingLink:
    """D's side, on a fresh connection. Waits at most the handshake time-out.

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
        _check_peer_user(connection)  # only now: a refusal reaches nobody whose HELLO is still unread
        protocol = _judge(hello, identity)
        intake = _intake(connection, hello, fd, identity.layout, copier)
        try:
            connection.send(encode(Welcome(protocol=protocol, capabilities=())))
        except LinkClosed:
            intake.close()
            raise
    except Refusal as refusal:
        with suppress(LinkClosed):  # it has its refusal, or is gone
            connection.send(encode(Refused(code=refusal.code, message=clipped(str(refusal)))))
        raise
    finally:
        if fd is not None:
            os.close(fd)  # the mapping, if there is one, keeps the memory
    connection.set_timeout(settings.progress_timeout_s)
    return IncomingLink(connection, intake, protocol, hello)


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
    attempts: list[tuple[str, Callable[[], socket.socket]]] = []
    name = endpoint.unix_name
    if SHM in endpoint.transports and name is not None and pool.fd is not None and endpoint.host_id == host_id():
        attempts.append((SHM, partial(_dial_unix, name, settings.connect_timeout_s)))
    if TCP in endpoint.transports:
        attempts.append((TCP, partial(_dial_tcp, endpoint.host, endpoint.port, settings.connect_timeout_s)))
    return attempts


def _dial_unix(name: bytes, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(name)
    except OSError:
        sock.close()
        raise
    return sock


def _dial_tcp(host: str, port: int, timeout_s: float) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=timeout_s)
    keep_alive(sock)
    return sock


def _introduce(
    connection: FrameSocket, identity: PeerIdentity, target: tuple[str, str], pool: KvPool, transport: str
) -> int:
    """Say HELLO, and hear which version is agreed on."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        oldest_protocol=OLDEST_PROTOCOL_VERSION,
        worker_id=identity.worker_id,
        incarnation=identity.incarnation,
        target_worker_id=target[0],
        target_incarnation=target[1],
        fingerprint=identity.fingerprint,
        layout=identity.layout.to_wire(),
        transport=transport,
        num_blocks=pool.num_blocks,
        capabilities=(CONVERTS,),
    )
    if transport == SHM:
        assert pool.fd is not None, "shm is attempted only with a pool that can be shared"
        try:
            fd = read_only(pool.fd)
        except OSError as error:
            raise Refusal(RefusalCode.TRANSPORT, f"our own pool cannot be shared: {error}") from error
        try:
            connection.send_with_fd(encode(hello), fd)
        finally:
            os.close(fd)
    else:
        connection.send(encode(hello))
    match connection.receive():
        case Welcome(protocol=protocol) if OLDEST_PROTOCOL_VERSION <= protocol <= PROTOCOL_VERSION:
            return protocol
        case Refused(code=code, message=message):
            raise Refusal(code, f"{target[0]} refuses the link ({code}): {message}")
        case None:
            raise LinkClosed(f"{target[0]} does not answer the handshake")
        case other:
            raise ProtocolError(f"the answer to HELLO is {type(other).__name__}, or of a version we do not speak")


def _judge(hello: Hello, identity: PeerIdentity) -> int:
    """The version to speak with the author of `hello`. Raises `Refusal`."""
    protocol = min(hello.protocol, PROTOCOL_VERSION)
    if protocol < max(hello.oldest_protocol, OLDEST_PROTOCOL_VERSION):
        raise Refusal(
            RefusalCode.PROTOCOL,
            f"{hello.worker_id} speaks versions {hello.oldest_protocol} to {hello.protocol}, "
            f"this worker {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
        )
    if (hello.target_worker_id, hello.target_incarnation) != (identity.worker_id, identity.incarnation):
        raise Refusal(
            RefusalCode.IDENTITY,
            f"{hello.target_worker_id}/{hello.target_incarnation} is wanted, "
            f"this is {identity.worker_id}/{identity.incarnation}",
        )
    if hello.fingerprint != identity.fingerprint:
        raise Refusal(
            RefusalCode.FINGERPRINT,
            f"the models differ: {hello.fingerprint.hex()[:16]} and {identity.fingerprint.hex()[:16]}",
        )
    try:
        layout = KvLayout.from_wire(hello.layout)
    except ConfigError as error:
        raise Refusal(RefusalCode.LAYOUT, str(error)) from error
    if layout != identity.layout:
        _check_conversion(hello, layout, identity.layout)
    return protocol


def _check_conversion(hello: Hello, source: KvLayout, target: KvLayout) -> None:
    """That the author of `hello` can make blocks of our layout, `target`, of its own."""
    differ = f"the KV layouts differ: {source} and {target}"
    if (reason := compatible(source, target)) is not None:
        raise Refusal(RefusalCode.LAYOUT, f"{reason}; {differ}")
    if CONVERTS not in hello.capabilities:
        raise Refusal(RefusalCode.LAYOUT, f"{hello.worker_id} does not convert, and {differ}")
    if hello.transport != TCP:
        raise Refusal(RefusalCode.TRANSPORT, f"{hello.transport} takes blocks as they are, and {differ}")


def _intake(connection: FrameSocket, hello: Hello, fd: int | None, layout: KvLayout, copier: BlockCopier) -> Intake:
    if hello.transport == TCP and not connection.is_unix:
        return TcpIntake(connection, copier)
    if hello.transport != SHM or fd is None:
        raise Refusal(RefusalCode.TRANSPORT, f"transport {hello.transport!r} is not possible on this socket")
    try:
        return ShmIntake(fd, hello.num_blocks, layout.block_bytes, copier)
    except HandshakeRefused as error:
        raise Refusal(RefusalCode.TRANSPORT, str(error)) from error


def _check_peer_user(connection: FrameSocket) -> None:
    # An abstract name has no file permissions: anybody on this host can connect.
    user = connection.peer_user()
    if user is not None and user != os.getuid():
        raise Refusal(RefusalCode.IDENTITY, f"user {user} may not link to a worker of user {os.getuid()}")
