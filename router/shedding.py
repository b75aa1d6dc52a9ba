"""Who is refused when there is too much to do: the worse a request's priority, the sooner. Pure.

Nothing that was accepted is ever broken for it.
"""

from __future__ import annotations

from engine.errors import QueueFull
from engine.priority import MAX_PRIORITY
from router.policy import PricedPair

_QUEUES = ("prefill_queue", "decode_blocks")
"""Terms of a price that are other requests' work."""


def allowance(priority: int) -> float:
    """Of all places and of its time, the share that a request may count on: 1 for priority 0, one sixteenth less for
    each step that is worse and as much more for each that is better, so 0.5 to 1.5."""
    return 1.0 - priority / (2 * MAX_PRIORITY)


def check_in_time(best: PricedPair, remaining_s: float, priority: int = 0) -> None:
    """Raise `QueueFull`, with the time to wait, if the work ahead of a request alone takes longer than the request has.

    Sooner is better than at the deadline: the client can go elsewhere, and nobody computes what comes too late. How
    much of that work a request overtakes, or is overtaken by, is not known here: hence its allowance.
    """
    wait_s = sum(term.ms for term in best.terms if term.name in _QUEUES) / 1000
    if wait_s > remaining_s * allowance(priority):
        error = QueueFull(
            f"about {wait_s:.3g} s of work are ahead of it, which is more than the {remaining_s:.3g} s that it has"
            f" allow at priority {priority}"
        )
        error.retry_after_s = wait_s - remaining_s * allowance(priority)
        raise error
