"""Routers that stand beside the one that serves: its successor while that starts, its predecessor while that drains.

All three are the member `router`; they differ in `attempt`. Only `cluster.reconcile` writes their states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.events import ROUTER_ID, Phase
from cluster.member_state import MemberState

NEXT_ID, OLD_ID = "router-next", "router-old"
"""What others see them as."""


@dataclass(slots=True)
class Succession:
    """Invariants: `next` has a later attempt than the router that serves, `old` an earlier one; `old` is DYING."""

    next: MemberState | None = None
    old: MemberState | None = None

    def __iter__(self) -> Iterator[MemberState]:
        return (member for member in (self.next, self.old) if member is not None)

    @property
    def under_way(self) -> bool:
        return self.next is not None or self.old is not None

    def begin(self, router: MemberState) -> MemberState:
        """A successor that is to be started."""
        self.next = MemberState(ROUTER_ID, attempt=router.attempt)
        return self.next

    def take_over(self, router: MemberState) -> None:
        """The successor serves now; `router` is to drain."""
        self.next, self.old = None, router
        router.phase, router.address, router.due, router.last_reason = Phase.DYING, "", None, "another one took over"

    def forget_failed(self) -> None:
        """What it could not start with is not wanted any more."""
        if self.next is not None and self.next.phase is Phase.ABSENT:
            self.next = None

    def promote(self) -> MemberState | None:
        """The router is dead: whoever was to take over is the router now, as far as it is."""
        heir, self.next = self.next, None
        return heir

    def names(self) -> Iterator[tuple[str, MemberState]]:
        return ((NEXT_ID if member is self.next else OLD_ID, member) for member in self)

    def check_integrity(self, router: MemberState) -> None:
        assert self.next is None or self.next.attempt >= router.attempt, "a successor is older than the router"
        assert self.next is None or self.next.phase in (Phase.ABSENT, Phase.STARTING, Phase.DYING)
        assert self.old is None or (self.old.phase is Phase.DYING and self.old.attempt < router.attempt)
