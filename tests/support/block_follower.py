"""What a router does with the events of a worker's blocks, in its simplest form."""

from __future__ import annotations

from engine.block_events import Cleared, EventBatch, Removed, Snapshot, Stored, resident_digest


class BlockFollower:
    """A set of hashes kept equal to what is resident in one pool. Asserts all that the events promise."""

    def __init__(self) -> None:
        self.resident: dict[bytes, bytes | None] = {}
        """Hash -> hash of the parent; None for the first of a chain, and where a snapshot does not say."""
        self.sequence = 0
        self.needs_snapshot = False

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if event.sequence <= self.sequence:
                continue  # a snapshot was ahead of it
            if isinstance(event, Cleared):
                self.resident.clear()
                self.needs_snapshot = event.resync
            else:
                assert event.sequence == self.sequence + 1, "a gap that nothing explains"
            self.sequence = event.sequence
            if self.needs_snapshot:
                continue
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                self._remove(event)
            assert event.digest == resident_digest(self.resident), f"the digest differs after {event}"

    def restart(self, snapshot: Snapshot) -> None:
        assert snapshot.sequence >= self.sequence
        self.resident = dict.fromkeys(snapshot.hashes)
        assert len(self.resident) == len(snapshot.hashes)
        assert snapshot.digest == resident_digest(snapshot.hashes)
        self.sequence = snapshot.sequence
        self.needs_snapshot = False

    def _store(self, event: Stored) -> None:
        parent = event.parent
        for content_hash in event.hashes:
            assert content_hash not in self.resident, "stored twice"
            assert parent is None or parent in self.resident, "stored without its parent"
            self.resident[content_hash] = parent
            parent = content_hash

    def _remove(self, event: Removed) -> None:
        for content_hash in event.hashes:
            assert content_hash not in self.resident.values(), "removed before what continues it"
            del self.resident[content_hash]
