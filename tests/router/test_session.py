from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.block_hash import pack_tokens
from engine.errors import ProtocolError, QueueFull, WorkerLost
from kvrelay.v1 import worker_pb2
from router.peer import Peer
from router.session import Inbox, LaneClosed, WorkerSession

PEER = Peer(
    worker_id="d0",
    incarnation="1",
    role="decode",
    address="a:1",
    model="m",
    fingerprint=b"f",
    block_size=4,
    num_blocks=8,
    max_model_len=99,
    pid=1,
)


class Harness:
    def __init__(self, max_outbox: int = 10, capacity: int = 10) -> None:
        self.aborts = 0
        self.overflows = 0
        self.session = WorkerSession(PEER, max_outbox, self._abort)
        self.inbox = Inbox(capacity, self._overflow)

    def _abort(self) -> None:
        self.aborts += 1

    def _overflow(self) -> None:
        self.overflows += 1

    async def sent(self) -> list[str | None]:
        """Kinds of what waits to be written."""
        kinds: list[str | None] = []
        outgoing = self.session.outgoing()
        for _ in range(self.session.outbox_size):
            kinds.append((await anext(outgoing)).WhichOneof("message"))
        return kinds


START = worker_pb2.SessionRequest(start=worker_pb2.Start(request_id="r"))


def step(*request_ids: str) -> worker_pb2.SessionResponse:
    outputs = [worker_pb2.StepOutput(request_id=request_id) for request_id in request_ids]
    return worker_pb2.SessionResponse(step=worker_pb2.Step(outputs=outputs))


def columns(lanes: Sequence[int], indexes: Sequence[int], reasons: bytes) -> worker_pb2.SessionResponse:
    entries = worker_pb2.OutputColumns(
        lanes=pack_tokens(lanes),
        indexes=pack_tokens(indexes),
        token_ids=pack_tokens([100 + index for index in indexes]),
        finish_reasons=reasons,
    )
    return worker_pb2.SessionResponse(step=worker_pb2.Step(columns=entries))


async def test_columns_reach_each_lane_that_is_open() -> None:
    harness = Harness()
    with harness.session.open("r1", harness.inbox) as one, harness.session.open("r2", harness.inbox) as two:
        harness.session.deliver(columns([two.number, one.number, 4711], [5, 0, 9], bytes((0, 2, 0))))
        assert await harness.inbox.take() == [(two, (5, 105, 0, None)), (one, (0, 100, 2, None))]
    assert harness.session.strays == 1
    harness.session.check_integrity()


@pytest.mark.parametrize("broken", [{"lanes": b"123"}, {"token_ids": b""}, {"finish_reasons": b"12"}])
async def test_columns_of_unequal_length_end_the_session(broken: dict[str, bytes]) -> None:
    harness = Harness()
    with harness.session.open("r1", harness.inbox) as lane:
        message = columns([lane.number], [0], b"\0")
        for name, value in broken.items():
            setattr(message.step.columns, name, value)
        with pytest.raises(ProtocolError, match="column"):
            harness.session.deliver(message)


async def test_one_step_message_reaches_each_request_it_is_about() -> None:
    harness = Harness()
    with harness.session.open("r1", harness.inbox) as one, harness.session.open("r2", harness.inbox) as two:
        harness.session.deliver(step("r2", "r1", "r2"))
        assert [lane for lane, _ in await harness.inbox.take()] == [two, one, two]


async def test_leaving_a_lane_cancels_what_was_begun() -> None:
    harness = Harness()
    with harness.session.open("r", harness.inbox) as lane:
        lane.send(START)
        assert harness.session.in_flight == 1
    assert await harness.sent() == ["start", "cancel"]
    assert harness.session.in_flight == 0
    lane.close()
    assert await harness.sent() == []


async def test_a_lane_that_was_never_used_sends_nothing() -> None:
    harness = Harness()
    with harness.session.open("r", harness.inbox):
        pass
    assert await harness.sent() == []


async def test_a_request_that_the_worker_ended_is_not_cancelled() -> None:
    harness = Harness()
    with harness.session.open("r", harness.inbox) as lane:
        lane.send(START)
        ended = worker_pb2.Ended(request_id="r", error="QueueFull", message="full", retryable=True)
        harness.session.deliver(worker_pb2.SessionResponse(ended=ended))
        ((_, closed),) = await harness.inbox.take()
    assert isinstance(closed, LaneClosed)
    assert isinstance(closed.error, QueueFull)
    assert (closed.retryable, closed.lost) == (True, False)
    assert await harness.sent() == ["start"]


async def test_a_message_on_a_request_that_is_over_is_counted_and_dropped() -> None:
    harness = Harness()
    harness.session.deliver(step("gone"))
    assert harness.session.strays == 1


async def test_the_end_of_a_session_reaches_every_request_on_it() -> None:
    harness = Harness()
    lanes = [harness.session.open(str(n), harness.inbox) for n in range(3)]
    harness.session.end(WorkerLost("gone"))
    messages = await harness.inbox.take()
    assert [lane for lane, _ in messages] == lanes
    assert all(isinstance(message, LaneClosed) and message.lost for _, message in messages)
    harness.session.check_integrity()
    with pytest.raises(WorkerLost, match="gone"):
        harness.session.open("r", harness.inbox)


async def test_a_full_inbox_ends_its_request_and_cancels_it_at_the_worker() -> None:
    harness = Harness(capacity=2)
    other = Inbox(10, lambda: None)
    lane = harness.session.open("slow", harness.inbox)
    harness.session.open("fast", other)
    lane.send(START)
    for _ in range(4):
        harness.session.deliver(step("slow", "fast"))
    assert harness.overflows == 1
    assert lane.closed
    assert await harness.sent() == ["start", "cancel"]
    assert len(await other.take()) == 4


async def test_a_worker_that_does_not_read_is_given_up() -> None:
    harness = Harness(max_outbox=2)
    lane = harness.session.open("r", harness.inbox)
    for _ in range(3):
        lane.send(START)
    assert harness.aborts == 1
    assert isinstance(harness.session.over, WorkerLost)
    assert lane.closed


async def test_a_second_welcome_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="second welcome"):
        Harness().session.deliver(worker_pb2.SessionResponse(welcome=worker_pb2.Welcome()))


async def test_a_message_of_a_newer_protocol_is_passed_over() -> None:
    harness = Harness()
    harness.session.deliver(worker_pb2.SessionResponse())
    assert harness.session.strays == 0


async def test_tokens_in_flight_are_those_of_the_lanes() -> None:
    harness = Harness()
    with harness.session.open("r", harness.inbox) as lane:
        lane.tokens_to_compute = 12
        assert harness.session.in_flight_tokens == 12
    assert harness.session.in_flight_tokens == 0


async def test_a_snapshot_stays_until_something_that_it_tells_has_changed() -> None:
    harness = Harness()
    with harness.session.open("r", harness.inbox) as lane:
        lane.tokens_to_compute = 5
        before = harness.session.snapshot()
        lane.tokens_to_compute = 5
        assert harness.session.snapshot() is before
        lane.tokens_to_compute = 0
        assert harness.session.snapshot().in_flight_tokens == 0
