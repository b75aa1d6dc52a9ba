"""What a decode worker knows of one live request. Written by `decode_worker.worker` alone, on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from decode_worker.hand_over import HandOver
from engine.errors import EngineError, TransferError
from engine.request import Request
from worker.session import Session
from worker.threads import Timer


class Phase(Enum):
    WAITING = "waiting"
    """For blocks."""
    OPEN = "open"
    """A link may write into its missing slots."""
    CLOSING = "closing"
    """The ticket is closed, but a write that had begun is not over."""
    SETTLED = "settled"
    """No link touches it."""


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """One live request."""

    key: str
    """Its id in the engine, and the id of its ticket."""
    session: Session
    request_id: str
    request: Request
    traceparent: str
    deadline: Timer
    lane: int = 0
    """What its router calls it in columns; 0: nothing."""
    phase: Phase = Phase.WAITING
    hand_over: HandOver | None = None
    """From the grant on; never for `compute_here`."""
    busy: set[int] = field(default_factory=set)
    """Slots of the closed ticket that a link is still writing."""
    given_up: TransferError | None = None
    """Why the rest of the blocks will not come."""
    uncounted: TransferError | None = None
    """The same, while it may still turn out that the request was cancelled and the transfer ended for that."""
    stopping: bool = False
    """Cancelled, overdue or failed."""
    forgotten: bool = False
    """Stopping, and the engine has nothing of it any more."""
    error: EngineError | None = None
    """What `Ended` will say."""
