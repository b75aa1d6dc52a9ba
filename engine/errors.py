"""Every error that we raise on purpose.

EngineError
├── ConfigError             a setting is out of range, or two settings contradict each other
├── ModelError              a model is unknown, missing a file, or damaged
├── NativeUnavailable       native code cannot be built or loaded here: says why; the slower way runs
├── RequestError            what a client asked for can never be served: names the field and the limit
├── Unauthenticated         nobody knows who calls
├── PermissionDenied        the one who calls may not
├── CapacityError           not now: the caller may try again later or elsewhere
│   ├── NoFreeBlocks        the pool cannot hold this at the moment
│   ├── QueueFull           a bounded queue is full
│   ├── PinLimit            pinned prefixes may not keep more of the pool
│   └── RateLimited         the tenant has used what it may; says for how long
├── TransferError           KV did not arrive as agreed; the request recomputes
│   ├── ProtocolError       bytes that are no frame of ours, or not now
│   ├── HandshakeRefused    the two ends cannot exchange blocks: says why
│   ├── LinkClosed          the peer is gone, or was given up after its deadline
│   ├── StaleTicket         the ticket is unknown, over, or of another incarnation
│   ├── SlotMismatch        the frame names a block, slot or generation that the ticket does not
│   ├── HashMismatch        the frame's content hash is not the one expected
│   └── DigestMismatch      the bytes are not those that were sent
├── UnavailableError        nobody can serve this now
│   ├── NoWorkers           no worker of the role is ready
│   ├── WorkerLost          the worker ended or stopped answering while the request was on it
│   └── Draining            the worker takes no new requests
├── DeadlineExceeded        the request's time is over
├── RequestCancelled        the client cancelled, or went away
└── InternalError           a fault of ours, reported with its cause
    └── NotFinite           logits that no token can be drawn from

The edges (gRPC servicers) turn a class into a status once, in a table.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the tree. `retryable` says whether another worker may do better."""

    retryable = False
    retry_after_s: float | None = None
    """When to try again, where that is known."""


class ConfigError(EngineError):
    pass


class ModelError(EngineError):
    pass


class NativeUnavailable(EngineError):
    pass


class RequestError(EngineError):
    """A request that can never be served.

    `field` is the name in the public API; the message says the value and the limit.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class Unauthenticated(EngineError):
    pass


class PermissionDenied(EngineError):
    pass


class CapacityError(EngineError):
    retryable = True


class NoFreeBlocks(CapacityError):
    pass


class QueueFull(CapacityError):
    pass


class PinLimit(CapacityError):
    pass


class RateLimited(CapacityError):
    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TransferError(EngineError):
    retryable = True


class ProtocolError(TransferError):
    pass


class HandshakeRefused(TransferError):
    pass


class LinkClosed(TransferError):
    pass


class StaleTicket(TransferError):
    pass


class SlotMismatch(TransferError):
    pass


class HashMismatch(TransferError):
    pass


class DigestMismatch(TransferError):
    pass


class UnavailableError(EngineError):
    retryable = True


class NoWorkers(UnavailableError):
    pass


class WorkerLost(UnavailableError):
    pass


class Draining(UnavailableError):
    pass


class DeadlineExceeded(EngineError):
    pass


class RequestCancelled(EngineError):
    pass


class InternalError(EngineError):
    pass


class NotFinite(InternalError):
    pass
