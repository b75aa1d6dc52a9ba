"""Who a worker says it is, and whether it may serve here. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import HandshakeRefused
from kvrelay._wire import MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2
from router.policy import DECODE, PREFILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One process of a worker. A restarted worker has another incarnation: it is another peer."""

    worker_id: str
    incarnation: str
    role: str
    address: str
    model: str
    fingerprint: bytes
    block_size: int
    num_blocks: int
    max_model_len: int
    pid: int
    tells_blocks: bool = False
    """Whether it says which blocks are resident."""

    @classmethod
    def from_welcome(cls, welcome: worker_pb2.Welcome, address: str) -> Peer:
        """Raises `HandshakeRefused` if the welcome cannot be understood."""
        if not MIN_PROTOCOL_VERSION <= welcome.protocol <= PROTOCOL_VERSION + 1:
            raise HandshakeRefused(
                f"it speaks protocol {welcome.protocol}, this router {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION}"
            )
        if welcome.role not in (PREFILL, DECODE):
            raise HandshakeRefused(f"its role is {welcome.role!r}, must be {PREFILL!r} or {DECODE!r}")
        for name in ("worker_id", "incarnation", "block_size", "num_blocks", "max_model_len"):
            if not getattr(welcome, name):
                raise HandshakeRefused(f"its welcome has no {name}")
        return cls(
            worker_id=welcome.worker_id,
            incarnation=welcome.incarnation,
            role=welcome.role,
            address=address,
            model=welcome.model,
            fingerprint=welcome.fingerprint,
            block_size=welcome.block_size,
            num_blocks=welcome.num_blocks,
            max_model_len=welcome.max_model_len,
            pid=welcome.pid,
            tells_blocks=welcome.tells_blocks,
        )


def check_peer(peer: Peer, fingerprint: bytes, fleet: Sequence[Peer], expected_id: str | None) -> None:
    """Raise `HandshakeRefused` unless `peer` can serve beside the ready workers of `fleet`.

    `expected_id` is the worker that should answer at this address, if that is known.
    """
    if expected_id is not None and peer.worker_id != expected_id:
        raise HandshakeRefused(f"worker {peer.worker_id!r} answers where {expected_id!r} was expected")
    if peer.fingerprint != fingerprint:
        raise HandshakeRefused(
            f"its model {peer.model!r} has fingerprint {peer.fingerprint.hex()[:16]}, "
            f"this router's has {fingerprint.hex()[:16]}"
        )
    for other in fleet:
        if other.worker_id == peer.worker_id:
            raise HandshakeRefused(f"worker {peer.worker_id!r} is connected already, at {other.address}")
        if other.block_size != peer.block_size:
            raise HandshakeRefused(
                f"its block_size is {peer.block_size}, that of {other.worker_id!r} is {other.block_size}"
            )
