"""Who a worker says it is, and whether it may serve here. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import WEIGHTS_DTYPES
from engine.errors import ConfigError, HandshakeRefused
from engine.kv_layout import KvLayout, compatible
from engine.model_config import weights_fingerprint
from kvrelay._wire import FIRST_SAMPLING_FIELDS, MIN_PROTOCOL_VERSION, PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2
from router.snapshot import DECODE, PREFILL


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
    layout: KvLayout | None = None
    """None: it did not say. Links compare it again."""
    transports: tuple[str, ...] = ()
    """Of its KV links; empty if it did not say."""
    device: str = ""
    kernels: str = ""
    """Where it computes, and what does, in its own words."""
    prewarm: worker_pb2.Prewarm | None = None
    """Of a decode worker: what prefill workers may be told of it."""
    sampling_fields: frozenset[str] = FIRST_SAMPLING_FIELDS
    """Fields of sampling that it acts upon; what else is asked of it, it would silently not do."""

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
            layout=_layout(welcome),
            transports=tuple(welcome.kv_transports),
            device=welcome.device,
            kernels=welcome.kernels,
            prewarm=_prewarm(welcome) if welcome.role == DECODE else None,
            sampling_fields=frozenset(welcome.sampling_fields) or FIRST_SAMPLING_FIELDS,
        )


def check_peer(peer: Peer, fingerprint: bytes, fleet: Sequence[Peer], expected_id: str | None) -> None:
    """Raise `HandshakeRefused` unless `peer` can serve beside the ready workers of `fleet`.

    `expected_id` is the worker that should answer at this address, if that is known.
    """
    if expected_id is not None and peer.worker_id != expected_id:
        raise HandshakeRefused(f"worker {peer.worker_id!r} answers where {expected_id!r} was expected")
    if peer.fingerprint not in {weights_fingerprint(fingerprint, dtype) for dtype in WEIGHTS_DTYPES}:
        raise HandshakeRefused(
            f"its model {peer.model!r} has fingerprint {peer.fingerprint.hex()[:16]}, "
            f"this router's has {fingerprint.hex()[:16]}"
        )
    for other in fleet:
        if other.worker_id == peer.worker_id:
            raise HandshakeRefused(f"worker {peer.worker_id!r} is connected already, at {other.address}")
        if other.fingerprint != peer.fingerprint:
            raise HandshakeRefused(f"its weights_dtype is not that of {other.worker_id!r}: their KV differs")
        if other.block_size != peer.block_size:
            raise HandshakeRefused(
                f"its block_size is {peer.block_size}, that of {other.worker_id!r} is {other.block_size}"
            )
        if (reason := _incompatible(peer, other) if peer.role == PREFILL else _incompatible(other, peer)) is not None:
            raise HandshakeRefused(f"no KV can pass between it and {other.worker_id!r}: {reason}")


def _layout(welcome: worker_pb2.Welcome) -> KvLayout | None:
    if not welcome.HasField("layout"):
        return None
    try:
        return KvLayout.from_message(welcome.layout)
    except ConfigError as error:
        raise HandshakeRefused(f"its layout: {error}") from error


def _incompatible(prefill: Peer, decode: Peer) -> str | None:
    """Why no block of `prefill` can go to `decode`, if they are that and say what theirs are like."""
    if (prefill.role, decode.role) != (PREFILL, DECODE):
        return None
    if prefill.transports and decode.transports and not set(prefill.transports) & set(decode.transports):
        offers = f"{', '.join(prefill.transports)} of {prefill.worker_id}, {', '.join(decode.transports)}"
        return f"kv_transports have none in common: {offers} of {decode.worker_id}"
    if prefill.layout is None or decode.layout is None:
        return None
    return compatible(prefill.layout, decode.layout)


def _prewarm(welcome: worker_pb2.Welcome) -> worker_pb2.Prewarm:
    return worker_pb2.Prewarm(
        worker_id=welcome.worker_id,
        incarnation=welcome.incarnation,
        link_endpoint=welcome.link_endpoint,
        layout=welcome.layout if welcome.HasField("layout") else None,
    )
