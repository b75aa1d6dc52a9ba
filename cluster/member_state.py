"""What the reconciler knows of one member. Only `cluster.reconcile` has it changed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from cluster.events import ROUTER_ID, MemberView, Phase
from cluster.spec import SupervisionSpec


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

    def view(self, name: str) -> MemberView:
        return MemberView(
            member_id=name,
            phase=self.phase,
            attempt=self.attempt,
            address=self.address,
            last_reason=self.last_reason,
            starts_again=self.phase is Phase.ABSENT and self.due is not None and self.attempt > 0,
            role=self.role,
        )

    def judge_service(self, limits: SupervisionSpec, now: float) -> None:
        """At the end of an actor: long service makes up for former deaths."""
        if self.phase is Phase.READY and now - self.ready_at >= limits.stable_s:
            self.failures = 0

    def pause_s(self, limits: SupervisionSpec) -> float:
        """Before the next start."""
        # The exponent is capped too: 2.0**1024 overflows.
        return min(limits.backoff_min_s * 2.0 ** min(self.failures - 1, 32), limits.backoff_max_s)
