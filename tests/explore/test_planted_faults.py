"""Each fault that is planted here into the real code is found by fewer schedules than are played anyway."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
from explorer.explore import Failure, exploring, play_seed, shrunk

from decode_worker.stream import Phase, Stream
from decode_worker.worker import DecodeWorker
from engine.engine import Engine
from engine.errors import EngineError, SlotMismatch, TransferError
from kv_transfer.frames import BlockEntry, Blocks
from kv_transfer.receiver_link import ReceiverLink
from kv_transfer.reservation import ReservationTable, WriteGrant, WriteOutcome
from kv_transfer.transfers import OutgoingTransfers
from prefill_worker.computing import PromptComputer
from prefill_worker.worker import PrefillWorker
from worker.session import Session

SCHEDULES = 1500


def find(owner: type, method: str, planted: Callable[..., Any]) -> Failure:
    """What the first schedule breaks that finds it."""

    def explore() -> Failure | None:
        return next((failure for seed in range(SCHEDULES) if (failure := play_seed(seed)) is not None), None)

    with mock.patch.object(owner, method, planted):
        failure = exploring(explore)
    assert failure is not None, "no schedule found it"
    return failure


def test_finds_that_slots_that_a_link_still_writes_are_not_quarantined() -> None:
    def close_ticket(self: DecodeWorker, record: Stream) -> None:
        record.phase = Phase.CLOSING
        self._table.close(record.key)

    failure = find(DecodeWorker, "_close_ticket", close_ticket)
    assert "given away while a link writes into it" in str(failure.error)


def test_finds_that_a_ticket_has_no_timer() -> None:
    failure = find(DecodeWorker, "_arm_lease_timer", lambda self: None)
    assert "open without an armed timer" in str(failure.error)


def test_finds_that_nobody_is_told_of_expired_leases() -> None:
    def expire(self: DecodeWorker) -> None:
        self._table.expire(self._core.now())
        self._arm_lease_timer()

    assert "waits without a ticket" in str(find(DecodeWorker, "_expire_leases", expire).error)


def test_finds_that_a_block_is_adopted_whatever_its_digest() -> None:
    copy = ReceiverLink._copy

    def copy_unread(self: ReceiverLink, link: Any, frame: Blocks, grant: WriteGrant, refused: Any) -> list[bool]:
        return [True] * len(copy(self, link, frame, grant, refused))

    assert "does not hold the KV" in str(find(ReceiverLink, "_copy", copy_unread).error)


def test_finds_that_a_block_is_taken_for_any_ticket_that_waits_for_its_ordinal() -> None:
    begin = ReservationTable.begin_write

    def begin_any(
        self: ReservationTable, ticket_id: str, incarnation: str, entries: Sequence[BlockEntry]
    ) -> tuple[WriteGrant, Mapping[int, TransferError]]:
        for ticket in self._open.values():
            ordinals = [entry.ordinal for entry in entries]
            if ticket.expected.issuperset(ordinals):
                ticket.expected.difference_update(ordinals)
                ticket.writing.update(ordinals)
                slots = tuple(ticket.blocks[ordinal].slot for ordinal in ordinals)
                grant = WriteGrant(next(self._serial), ticket.ticket_id, tuple(ordinals), slots)
                self._grants[grant.serial] = (ticket, grant)
                return grant, {}
        return begin(self, ticket_id, incarnation, entries)

    assert find(ReservationTable, "begin_write", begin_any)


def test_finds_that_a_late_write_counts_as_adopted() -> None:
    end = ReservationTable.end_write

    def end_write(self: ReservationTable, grant: WriteGrant, intact: Sequence[bool]) -> list[WriteOutcome]:
        late = WriteOutcome.LATE
        return [WriteOutcome.ADOPTED if o is late and all(intact) else o for o in end(self, grant, intact)]

    assert "still has" in str(find(ReservationTable, "end_write", end_write).error)


def test_finds_that_a_ticket_stays_open_when_its_request_is_stopped() -> None:
    stop = DecodeWorker._stop

    def stop_only(self: DecodeWorker, record: Stream, error: EngineError | None) -> None:
        if record.phase is Phase.OPEN:
            record.phase = Phase.SETTLED
        stop(self, record, error)

    assert find(DecodeWorker, "_stop", stop_only)


def test_finds_that_a_transfer_is_given_up_without_waiting_for_the_write_under_way() -> None:
    def give_up(self: DecodeWorker, record: Stream, error: TransferError) -> None:
        if record.given_up is None and record.phase in (Phase.WAITING, Phase.OPEN):
            record.given_up = error
            if record.phase is Phase.OPEN:
                self._table.close(record.key)
                self._settle(record)

    assert "while a link writes into it" in str(find(DecodeWorker, "_give_up", give_up).error)


def test_finds_that_quiet_slots_are_not_given_back() -> None:
    def quiet(self: DecodeWorker, key: str, slots: Collection[int]) -> None:
        pass

    assert "still has" in str(find(DecodeWorker, "_quiet", quiet).error)


def test_finds_that_the_end_of_a_session_cancels_nothing() -> None:
    assert find(DecodeWorker, "session_ended", lambda self, session: None)


def test_finds_that_a_cancel_is_lost() -> None:
    handle = DecodeWorker.handle

    async def handle_others(self: DecodeWorker, session: Session, message: Any) -> None:
        if message.WhichOneof("message") != "cancel":
            await handle(self, session, message)

    assert "still has" in str(find(DecodeWorker, "handle", handle_others).error)


def test_finds_that_a_deadline_is_ignored() -> None:
    assert "no deadline" in str(find(DecodeWorker, "_overdue", lambda self, key: None).error)


def test_finds_that_source_blocks_of_a_cancelled_request_are_reused_at_once() -> None:
    def cancel(self: PromptComputer, engine: Engine, key: str) -> None:
        self._sending.pop(key, None)
        engine.cancel(key)

    assert "given away while a link reads it" in str(find(PromptComputer, "cancel", cancel).error)


def test_finds_that_source_blocks_of_an_aborted_transfer_are_never_given_back() -> None:
    def transfer_over(self: PromptComputer, engine: Engine, key: str) -> None:
        if not self._busy.pop(key, None) and self._sending.pop(key, None) is not None:
            engine.release_held(key)

    assert "are left" in str(find(PromptComputer, "transfer_over", transfer_over).error)


def test_finds_that_a_transfer_ends_while_the_writer_has_a_block_of_it_in_hand() -> None:
    def fail(self: OutgoingTransfers, transfer: Any, error: EngineError) -> None:
        transfer.error, transfer.writing = transfer.error or error, False
        if transfer.queued:
            transfer.queued.clear()
            self._turn.remove(transfer)
        self._settle(transfer)

    assert find(OutgoingTransfers, "_fail", fail)


def test_finds_that_an_abort_is_ignored() -> None:
    assert find(OutgoingTransfers, "abort", lambda self, request_id: None)


def test_finds_that_the_end_of_a_request_is_told_twice() -> None:
    def end(self: PrefillWorker, record: Any) -> None:
        record.deadline.cancel()
        live = self._core.live.by_key(record.key)
        if live is not None and live is record:
            self._core.live.remove(live)
        record.session.send_ended(record.request_id, record.error)

    assert "a message after Ended" in str(find(PrefillWorker, "_end", end).error)


def test_finds_that_a_request_ends_before_its_transfer() -> None:
    def end_if_over(self: PrefillWorker, record: Any) -> None:
        if record.stopping or not record.computing:
            self._core.post(lambda engine: self._core.notify(self._end, record))

    assert find(PrefillWorker, "_end_if_over", end_if_over)


def test_a_failure_is_shrunk_and_its_choices_repeat_it() -> None:
    def refuse(self: ReservationTable, *arguments: Any) -> WriteGrant:
        raise SlotMismatch("planted") if self._grants else ZeroDivisionError("planted")

    with mock.patch.object(ReservationTable, "begin_write", refuse):

        def explore() -> tuple[Failure, Failure]:
            failure = next(failure for seed in range(SCHEDULES) if (failure := play_seed(seed)) is not None)
            return failure, shrunk(failure)

        failure, short = exploring(explore)
    assert isinstance(short.error, ZeroDivisionError)
    assert len(short.choices) <= len(failure.choices)


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
