"""How many requests of a batch may run at once. Pure: what came back goes in, with the time.

Interactive traffic goes first twice over: at the workers, where the batch has the worst priority, and here. A router
that refuses for want of room says when to come back; until then nothing is sent, and afterwards half as much at once.
Each round of answers without a refusal allows one request more.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_PAUSE_S = 30.0


@dataclass(slots=True)
class Pace:
    """Invariant: 1 <= limit <= most."""

    most: int
    """Requests at once, at most."""
    limit: float = 0.0
    """Requests at once, now."""
    resumes_at: float = 0.0
    """Until when nothing is sent."""
    refusals: int = 0
    """In all."""

    def __post_init__(self) -> None:
        self.limit = float(self.most)

    def may_send(self, in_flight: int, now: float) -> bool:
        return now >= self.resumes_at and in_flight < int(self.limit)

    def answered(self) -> None:
        self.limit = min(float(self.most), self.limit + 1.0 / self.limit)

    def refused(self, sent_at: float, retry_after_s: float, now: float) -> None:
        """`sent_at`: requests that were sent before the last refusal say nothing new, and the limit is halved once."""
        self.refusals += 1
        if sent_at >= self.resumes_at:
            self.limit = max(1.0, self.limit / 2.0)
        self.resumes_at = max(self.resumes_at, now + min(max(retry_after_s, 0.0), MAX_PAUSE_S))
