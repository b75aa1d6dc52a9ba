"""What the links of a worker have done so far, as frozen values for load reports, metrics and tests."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """One transfer, as one of its ends saw it."""

    blocks: int
    """Acknowledged (at the sender), adopted (at the receiver)."""
    bytes: int
    transport: str
    """Empty if no block got as far as a link."""
    seconds: float
    """From the first byte of the first block to the last acknowledgement or adoption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    links_open: int
    links_connected: Counts
    """By transport."""
    links_lost: Counts
    """By class of error; those that were never connected included."""
    fallbacks: int
    """Links that are on another transport than the preferred one because that failed."""
    transfers_open: int
    transfers_done: int
    transfers_failed: Counts
    """By class of error."""
    blocks_acked: int
    bytes_acked: int
    renewals: int
    """Frames, each of up to 64 tickets."""
    answers_ignored: int
    """Acknowledgements and refusals of something that is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    links_open: int
    """Connections, those in the handshake included."""
    links_accepted: Counts
    """By transport."""
    links_refused: Counts
    """Before or in the handshake, by reason."""
    links_lost: Counts
    """After the handshake, by class of error. A peer's orderly end is a `LinkClosed` too."""
    blocks_adopted: Counts
    """By transport."""
    bytes_adopted: Counts
    blocks_refused: Counts
    """By class of error."""
    blocks_duplicate: int
    blocks_late: int
    """Writes that ended after their ticket."""
    frames_ignored: int
    """Renewals, ends and aborts of tickets that are over."""


class Counters:
    """Named counts, from any thread. A name is a group, or a group and a label."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}

    def add(self, group: str, label: str = "", n: int = 1) -> None:
        with self._lock:
            self._counts.setdefault(group, Counter())[label] += n

    def add_all(self, label: str, amounts: Mapping[str, int]) -> None:
        """Add to several groups under one label."""
        with self._lock:
            for group, n in amounts.items():
                self._counts.setdefault(group, Counter())[label] += n

    def total(self, group: str) -> int:
        with self._lock:
            return sum(self._counts.get(group, Counter()).values())

    def by_label(self, group: str) -> Counts:
        with self._lock:
            return MappingProxyType(dict(self._counts.get(group, {})))
