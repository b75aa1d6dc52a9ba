"""What the two ends of links report to `bench.link_faults`."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.borrowing import Loan
from engine.errors import EngineError, TransferError
from kv_transfer.outgoing import OutgoingBlock
from kv_transfer.stats import TransferStats


@dataclass(slots=True)
class Seen:
    """What the receiver told about one ticket."""

    adopted: set[int] = field(default_factory=set)
    quiet: set[int] = field(default_factory=set)
    given_up: bool = False
    loans: list[Loan] = field(default_factory=list)


class DecodeListener:
    """Sorts events by ticket; every event wakes its lane."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._seen: dict[str, Seen] = {}

    def watch(self, ticket_id: str) -> Seen:
        with self.changed:
            return self._seen.setdefault(ticket_id, Seen())

    def forget(self, ticket_id: str) -> None:
        with self.changed:
            del self._seen[ticket_id]

    def blocks_adopted(self, ticket_id: str, ordinals: Sequence[int], num_bytes: int, transport: str) -> None:
        with self.changed:
            if (seen := self._seen.get(ticket_id)) is not None:
                seen.adopted.update(ordinals)
                self.changed.notify_all()

    def block_refused(self, ticket_id: str, ordinal: int, error: TransferError) -> None:
        self._give_up([ticket_id])

    def writes_quiet(self, ticket_id: str, slots: Collection[int]) -> None:
        with self.changed:
            if (seen := self._seen.get(ticket_id)) is not None:
                seen.quiet.update(slots)
                self.changed.notify_all()

    def blocks_lent(self, loan: Loan) -> None:
        with self.changed:
            seen = self._seen.get(loan.ticket_id)
            if seen is not None:
                seen.adopted.update(loan.ordinals)
                seen.loans.append(loan)
                self.changed.notify_all()
        if seen is None:
            loan.give_back(len(loan.ordinals))

    def link_lost(self, ticket_ids: Collection[str], error: TransferError) -> None:
        self._give_up(ticket_ids)

    def _give_up(self, ticket_ids: Collection[str]) -> None:
        with self.changed:
            for ticket_id in ticket_ids:
                if (seen := self._seen.get(ticket_id)) is not None:
                    seen.given_up = True
            self.changed.notify_all()


class PrefillListener:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.outcomes: queue.Queue[tuple[str, str]] = queue.Queue()
        """(request, `done` or class of error)"""
        self.loans_over = Counter[str]()
        """Request -> blocks."""

    def transfer_done(self, request_id: str, stats: TransferStats) -> None:
        self.outcomes.put((request_id, "done"))

    def transfer_failed(self, request_id: str, error: EngineError) -> None:
        self.outcomes.put((request_id, type(error).__name__))

    def block_doubted(self, block: OutgoingBlock) -> None:
        """What is flipped in a source is undone behind its transfer."""

    def loan_over(self, request_id: str, count: int) -> None:
        with self._lock:
            self.loans_over[request_id] += count
