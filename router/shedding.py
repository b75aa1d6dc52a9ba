"""Whether a request can still begin in time. Pure."""

from __future__ import annotations

from engine.errors import QueueFull
from router.policy import PricedPair

_QUEUES = ("prefill_queue", "decode_blocks")
"""Terms of a price that are other requests' work."""


def check_in_time(best: PricedPair, remaining_s: float) -> None:
    """Raise `QueueFull`, with the time to wait, if the work ahead of a request alone takes longer than the request has.

    Sooner is better than at the deadline: the client can go elsewhere, and nobody computes what comes too late.
    """
    wait_s = sum(term.ms for term in best.terms if term.name in _QUEUES) / 1000
    if wait_s > remaining_s:
        error = QueueFull(
            f"about {wait_s:.3g} s of work are ahead of it, which is more than the {remaining_s:.3g} s that it has"
        )
        error.retry_after_s = wait_s - remaining_s
        raise error
