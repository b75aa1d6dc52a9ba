"""How many blocks of a pool are in which state, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStats:
    """Every block is in exactly one state, so the first five add up to `total`."""

    free: int
    """Without content."""
    cached: int
    """Held by nobody, found by hash, given up when memory is wanted, unless it is pinned."""
    owned: int
    """Held by at least one request."""
    leased: int
    """Held by one request, and a link may write into it."""
    quarantined: int
    """Held by nobody but the quarantine: a link may still read or write it."""
    total: int
    pinned: int = 0
    """Of the cached and held ones: kept from eviction under a name."""
    copies_avoided: int = 0
    """Blocks needed in addition if nobody shared: the requests that hold each block, without the first."""
    copies: int = 0
    """Made since the start because a request was to write into a block that others can read."""
    evictions: int = 0
    """Cached blocks given up since the start."""
    event_overflows: int = 0
    """How often since the start events were dropped because nobody took them."""
    lent: int = 0
    """Of the owned ones: peers may read them where they are."""
    borrowed: int = 0
    """Blocks of peers that requests here read: beside `total`."""
    borrowed_lost: int = 0
    """Since the start: borrowed blocks that their owner took back while they were used."""
    damaged: int = 0
    """Blocks since the start whose contents were found to be other ones than were written; they were discarded."""
