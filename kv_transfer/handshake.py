"""What the two ends of a link say before its first block: who they are, and whether they may exchange blocks at all.

    P  HELLO ->     protocol versions, who P is, whom it wants, model fingerprint, KV layout, transport;
                    for `shm` and `adopt` with a descriptor of P's pool, through which only reading is possible
    both            if D has a cluster key: see `kv_transfer.authentication`
    D  <- WELCOME   the agreed version;  or  <- REFUSED with a code and a reason, and the end of the stream

Until P has proved that it knows the key it learns nothing of D but whether they have a version in common.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Protocol

from engine.cluster_key import ClusterKey
from engine.errors import ConfigError, HandshakeRefused, LinkClosed, ProtocolError
from engine.kv_layout import KvLayout, compatible
from kv_transfer import authentication
from kv_transfer.authentication import ProofLacking
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import (
    CARD,
    COLUMNS,
    CONVERTS,
    GROUPS_PROTOCOL_VERSION,
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Challenge,
    Frame,
    Hello,
    Refused,
    Welcome,
    encode,
)
from kv_transfer.identity import CONVERTING, MAPPING, PeerIdentity
from kv_transfer.transport_shm import read_only


class Mappable(Protocol):
    """Memory of blocks that a peer on this host can map, if `fd` is not None."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def fd(self) -> int | None: ...


class RefusalCode(StrEnum):
    PROTOCOL = "protocol"
    """No version in common."""
    IDENTITY = "identity"
    """The worker that P wants is not here, or not any more."""
    FINGERPRINT = "fingerprint"
    """Another model."""
    LAYOUT = "layout"
    AUTHENTICATION = "authentication"
    """The cluster key is not known, or not proved."""
    TRANSPORT = "transport"
    """This transport does not work between us; another may."""


class Refusal(HandshakeRefused):
    """With what the two ends of a handshake need beside the reason: its kind."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = str(code)


def introduce(
    connection: FrameSocket,
    identity: PeerIdentity,
    target: tuple[str, str],
    pool: Mappable,
    transport: str,
    key: ClusterKey | None,
    card: str = "",
) -> tuple[Hello, Welcome]:
    """P's side: say HELLO, and hear what is agreed on. `card`: the GPU that our blocks are on.

    Raises `Refusal`, or `HandshakeRefused` by ourselves, `LinkClosed`, `ProtocolError`.
    """
    proves = () if key is None else (authentication.CAPABILITY,)
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
        capabilities=(CONVERTS, *proves, *((f"{CARD}{card}",) if card else ())),
    )
    _say_hello(connection, hello, pool)
    agreed: int | None = None
    answer = connection.receive()
    if isinstance(answer, Challenge):
        if key is None:
            raise HandshakeRefused(f"{target[0]} asks for a proof of the cluster key, and none is set here")
        agreed = answer.protocol
        answer = authentication.answer(connection, key, hello, answer)
    elif isinstance(answer, Welcome) and key is not None:
        raise HandshakeRefused(f"a cluster key is set here, and {target[0]} asks for no proof of it")
    return hello, _agreed(answer, agreed, target[0])


def _say_hello(connection: FrameSocket, hello: Hello, pool: Mappable) -> None:
    if hello.transport not in MAPPING:
        connection.send(encode(hello))
        return
    assert pool.fd is not None, "it is attempted only with a pool that can be shared"
    try:
        fd = read_only(pool.fd)
    except OSError as error:
        raise Refusal(RefusalCode.TRANSPORT, f"our own pool cannot be shared: {error}") from error
    try:
        connection.send_with_fd(encode(hello), fd)
    finally:
        os.close(fd)


def _agreed(answer: Frame | None, challenged: int | None, peer: str) -> Welcome:
    """The WELCOME that `answer` must be; the challenge, if there was one, named its version too."""
    match answer:
        case Welcome(protocol=protocol) if OLDEST_PROTOCOL_VERSION <= protocol <= PROTOCOL_VERSION:
            if challenged not in (None, protocol):
                raise ProtocolError(f"{peer} proved version {challenged} and speaks {protocol}")
            return answer
        case Refused(code=code, message=message):
            raise Refusal(code, f"{peer} refuses the link ({code}): {message}")
        case None:
            raise LinkClosed(f"{peer} does not answer the handshake")
        case other:
            raise ProtocolError(f"the answer to HELLO is {type(other).__name__}, or of a version we do not speak")


def examine(connection: FrameSocket, hello: Hello, identity: PeerIdentity, key: ClusterKey | None) -> int:
    """D's side: the version to speak with the author of `hello`. Raises `Refusal`, `LinkClosed`, `ProtocolError`."""
    _check_peer_user(connection)
    protocol = min(hello.protocol, PROTOCOL_VERSION)
    if protocol < max(hello.oldest_protocol, OLDEST_PROTOCOL_VERSION):
        raise Refusal(
            RefusalCode.PROTOCOL,
            f"{hello.worker_id} speaks versions {hello.oldest_protocol} to {hello.protocol}, "
            f"this worker {OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
        )
    if key is not None:
        try:
            authentication.demand(connection, key, hello, protocol)
        except ProofLacking as error:
            raise Refusal(RefusalCode.AUTHENTICATION, str(error)) from error
    _compare(hello, identity)
    return protocol


def _compare(hello: Hello, identity: PeerIdentity) -> None:
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


def _check_conversion(hello: Hello, source: KvLayout, target: KvLayout) -> None:
    """That the author of `hello` can make blocks of our layout, `target`, of its own."""
    differ = f"the KV layouts differ: {source} and {target}"
    if (reason := compatible(source, target)) is not None:
        raise Refusal(RefusalCode.LAYOUT, f"{reason}; {differ}")
    if CONVERTS not in hello.capabilities:
        raise Refusal(RefusalCode.LAYOUT, f"{hello.worker_id} does not convert, and {differ}")
    if hello.transport not in CONVERTING:
        raise Refusal(RefusalCode.TRANSPORT, f"{hello.transport} takes blocks as they are, and {differ}")


def _check_peer_user(connection: FrameSocket) -> None:
    # An abstract name has no file permissions: anybody on this host can connect.
    user = connection.peer_user()
    if user is not None and user != os.getuid():
        raise Refusal(RefusalCode.IDENTITY, f"user {user} may not link to a worker of user {os.getuid()}")


def welcome_to(hello: Hello, protocol: int, *, on_host: bool) -> Welcome:
    """`on_host`: our pool is in host memory."""
    columns = on_host and hello.transport in MAPPING and protocol >= GROUPS_PROTOCOL_VERSION
    return Welcome(protocol=protocol, capabilities=(COLUMNS,) if columns else ())


def takes_columns(welcome: Welcome, hello: Hello) -> bool:
    """Whether `Copies` may be sent to its author."""
    return COLUMNS in welcome.capabilities and hello.transport in MAPPING
