"""What the reconciler knows of one member. Only `cluster.reconcile` writes it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from cluster.events import ROUTER_ID, Phase


@dataclass(slots=True)
class MemberState:
    member_id: str
    role: str = ROUTER_ID
    number: int = 0
    """Of its role."""
    phase: Phase = Phase.ABSENT
    attempt: int = 0
    """Of the present or the last actor; 0: none yet."""
    due: float | None = None
    """ABSENT: when to start. STARTING: when to give up waiting. DRAINING: when not to wait any longer."""
    address: str = ""
    ready_at: float = 0.0
    failures: int = 0
    """Deaths without `stable_s` of service in between; they set the pause."""
    served: bool = False
    """Whether it was ever ready."""
    last_reason: str = ""
    revision: Hashable = None
    """What the present actor was started with."""
    ending: bool = False
    """Its end is wanted: no failure."""
    leaving: bool = False
    """It is not started again."""
    must_move: bool = False
    """The present actor is to be replaced: its node goes away."""
