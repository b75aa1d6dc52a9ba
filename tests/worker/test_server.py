from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.cluster_key import ClusterKey
from engine.config import EngineConfig
from engine.errors import ConfigError, QueueFull, WorkerLost
from engine.plan import Pool
from kvrelay._server import MAX_WATCHES
from kvrelay._wire import PROTOCOL_VERSION, SESSION_TOKEN_KEY
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from worker.block_feed import BlockFeed
from worker.config import WorkerConfig
from worker.server import WorkerServer
from worker.session import MalformedRequest, Session

Stream = grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]
HELLO = worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id="r0"))
BOUND_S = 30.0
KEY = ClusterKey(bytes(range(32)))


class RecordingRole:
    """Records what the edge does to a role; `on_handle` decides what a request does."""

    def __init__(self) -> None:
        self.handled: list[worker_pb2.SessionRequest] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()
        self.on_handle: Callable[[Session, worker_pb2.SessionRequest], None] = lambda session, message: None
        self.loads = 0
        self.drained = False
        self.lost: WorkerLost | None = None
        self.seeds: list[int] = []
        self.feed = BlockFeed(16, self.seeds.append)
        self.on_welcome: Callable[[], object] = lambda: None

    def welcome(self) -> worker_pb2.Welcome:
        self.on_welcome()
        return worker_pb2.Welcome(protocol=PROTOCOL_VERSION, worker_id="w0", role="decode")

    def pool(self) -> Pool:
        return Pool(block_bytes=1, block_size=1, num_blocks=1, dtype="float32")

    @property
    def block_feed(self) -> BlockFeed:
        return self.feed

    def timings(self) -> dict[str, float]:
        return {}

    async def load(self) -> worker_pb2.Load:
        if self.lost is not None:
            raise self.lost
        self.loads += 1
        return worker_pb2.Load(running=self.loads)

    async def handle(self, session: Session, message: worker_pb2.SessionRequest) -> None:
        self.handled.append(message)
        self.on_handle(session, message)

    def session_ended(self, session: Session) -> None:
        self.ended.put_nowait(session.router_id)

    async def start(self) -> None:
        pass

    async def drain(self, timeout_s: float) -> None:
        self.drained = True

    async def stop(self) -> None:
        pass


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(worker_id="w0", model_name="m", engine=EngineConfig(model_path="none"), **settings)


@asynccontextmanager
async def serving(role: RecordingRole, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    server = WorkerServer(role, config(**settings))
    address = await server.start()
    try:
        async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(address) as channel:
            yield channel
    finally:
        await server.stop(0.0)


@pytest.fixture
def role() -> RecordingRole:
    return RecordingRole()


async def open_session(channel: grpc.aio.Channel) -> Stream:
    call: Stream = worker_pb2_grpc.WorkerStub(channel).Session()
    await call.write(HELLO)
    welcome = await read(call)
    assert welcome.WhichOneof("message") == "welcome"
    return call


@pytest.mark.parametrize("shown", [None, "wrong", ClusterKey(bytes(32)).session_token, ""])
async def test_a_router_without_the_cluster_key_has_no_effect(role: RecordingRole, shown: str | None) -> None:
    metadata = None if shown is None else ((SESSION_TOKEN_KEY, shown),)
    async with serving(role, cluster_key=KEY, max_sessions=1) as channel:
        call: Stream = worker_pb2_grpc.WorkerStub(channel).Session(metadata=metadata)
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):  # it may be over before it is written to
            await call.write(HELLO)

        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED

    assert (role.handled, role.loads, role.seeds, role.ended.qsize()) == ([], 0, [], 0)


async def test_a_router_with_the_cluster_key_is_served(role: RecordingRole) -> None:
    async with serving(role, cluster_key=KEY) as channel:
        call: Stream = worker_pb2_grpc.WorkerStub(channel).Session(metadata=((SESSION_TOKEN_KEY, KEY.session_token),))
        await call.write(HELLO)

        assert (await read(call)).WhichOneof("message") == "welcome"


async def read(call: Stream) -> worker_pb2.SessionResponse:
    message = await call.read()
    assert isinstance(message, worker_pb2.SessionResponse), "the stream is at its end"
    return message


async def read_kind(call: Stream, kind: str) -> Any:
    """The next message of `kind`; load reports in between are left out."""
    while True:
        message = await read(call)
        if message.WhichOneof("message") == kind:
            return getattr(message, kind)
        assert message.WhichOneof("message") == "load"


async def status_of(call: grpc.aio.StreamStreamCall[Any, worker_pb2.SessionResponse]) -> tuple[grpc.StatusCode, str]:
    """How the stream ends; messages before the end are read and dropped."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


def cancel(request_id: str) -> worker_pb2.SessionRequest:
    return worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(request_id=request_id))


async def test_hello_is_answered_by_welcome_and_a_load_report(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call = await open_session(channel)

        load = await read_kind(call, "load")

        assert load.running == 1


async def test_a_first_message_that_is_no_hello_ends_the_stream(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call: Stream = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(cancel("a"))

        assert await status_of(call) == (grpc.StatusCode.FAILED_PRECONDITION, "the first message must be Hello")
    assert role.handled == []


async def test_a_protocol_of_another_age_is_refused_with_the_versions(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call: Stream = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=99, router_id="r0")))

        code, details = await status_of(call)

    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "protocol 99" in details


async def test_requests_reach_the_role_in_order(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call = await open_session(channel)
        for name in "abc":
            await call.write(cancel(name))
        await call.done_writing()

        assert (await status_of(call))[0] is grpc.StatusCode.OK

    assert [message.cancel.request_id for message in role.handled] == ["a", "b", "c"]


@pytest.mark.parametrize("message", [worker_pb2.SessionRequest(), HELLO, cancel(""), cancel("x" * 257)])
async def test_a_malformed_message_ends_the_session(role: RecordingRole, message: worker_pb2.SessionRequest) -> None:
    async with serving(role) as channel:
        call = await open_session(channel)
        await call.write(message)

        assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert await role.ended.get() == "r0"
    assert role.handled == []


async def test_bytes_that_are_no_message_end_the_session(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call = channel.stream_stream(
            "/kvrelay.v1.Worker/Session",
            request_serializer=lambda data: data,
            response_deserializer=worker_pb2.SessionResponse.FromString,
        )()
        await call.write(HELLO.SerializeToString())
        await call.write(b"\xff\xff\xff")

        assert (await status_of(call))[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert await role.ended.get() == "r0"


async def test_a_broken_protocol_rule_that_the_role_finds_ends_the_session(role: RecordingRole) -> None:
    def refuse(session: Session, message: worker_pb2.SessionRequest) -> None:
        raise MalformedRequest("request_id 'a' is in use")

    role.on_handle = refuse
    async with serving(role) as channel:
        call = await open_session(channel)
        await call.write(cancel("a"))

        assert await status_of(call) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id 'a' is in use")
        assert await role.ended.get() == "r0"


@pytest.mark.parametrize(
    ("fault", "name", "retryable"), [(QueueFull("full"), "QueueFull", True), (KeyError("oops"), "InternalError", False)]
)
async def test_a_fault_in_one_request_ends_that_request_and_not_the_session(
    role: RecordingRole, fault: Exception, name: str, retryable: bool
) -> None:
    def fail_on_a(session: Session, message: worker_pb2.SessionRequest) -> None:
        if message.cancel.request_id == "a":
            raise fault
        session.send_ended(message.cancel.request_id, None)

    role.on_handle = fail_on_a
    async with serving(role) as channel:
        call = await open_session(channel)
        await call.write(cancel("a"))
        failed = await read_kind(call, "ended")
        await call.write(cancel("b"))
        finished = await read_kind(call, "ended")

    assert (failed.request_id, failed.error, failed.retryable) == ("a", name, retryable)
    assert (finished.request_id, finished.error) == ("b", "")


async def test_the_role_hears_of_a_router_that_cancels_its_stream(role: RecordingRole) -> None:
    async with serving(role) as channel:
        call = await open_session(channel)
        call.cancel()

        assert await role.ended.get() == "r0"


async def test_the_role_hears_of_a_router_that_goes_away(role: RecordingRole) -> None:
    async with serving(role) as channel:
        await open_session(channel)
        await channel.close()

        assert await role.ended.get() == "r0"


async def test_a_load_report_follows_when_a_request_ends_without_waiting_for_the_heartbeat(role: RecordingRole) -> None:
    role.on_handle = lambda session, message: session.send_ended(message.cancel.request_id, None)
    async with serving(role, heartbeat_s=3600.0) as channel:
        call = await open_session(channel)
        first = await read_kind(call, "load")
        await call.write(cancel("a"))
        await read_kind(call, "ended")

        assert (await read_kind(call, "load")).running > first.running


async def test_load_reports_come_without_traffic(role: RecordingRole) -> None:
    async with serving(role, heartbeat_s=0.001) as channel:
        call = await open_session(channel)

        assert [(await read_kind(call, "load")).running for _ in range(3)] == [1, 2, 3]


async def test_a_router_that_does_not_read_loses_its_session(role: RecordingRole) -> None:
    flood = worker_pb2.SessionResponse(ended=worker_pb2.Ended(request_id="x" * 100_000))

    def answer_with_a_flood(session: Session, message: worker_pb2.SessionRequest) -> None:
        for _ in range(100):  # 10 MB: beyond every buffer of the transport
            session.send(flood)

    role.on_handle = answer_with_a_flood
    async with serving(role, max_outbox=100) as channel:
        call = await open_session(channel)
        await call.write(cancel("fills the outbox; the writer gets stuck in it"))
        await call.write(cancel("does not fit any more"))

        assert await role.ended.get() == "r0"
        code, details = await status_of(call)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "100 messages wait for this router to read"


async def test_one_more_router_than_allowed_is_refused(role: RecordingRole) -> None:
    async with serving(role, max_sessions=1) as channel:
        await open_session(channel)
        second: Stream = worker_pb2_grpc.WorkerStub(channel).Session()

        assert (await status_of(second))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_stop_drains_the_role_and_tells_every_router(role: RecordingRole) -> None:
    server = WorkerServer(role, config())
    address = await server.start()
    async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(address) as channel:
        call = await open_session(channel)
        await server.stop(0.0)

        assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "worker w0 is stopping")
    assert role.drained
    assert await role.ended.get() == "r0"


async def test_a_router_that_is_welcomed_while_the_worker_begins_to_stop_is_told(role: RecordingRole) -> None:
    server = WorkerServer(role, config())
    address = await server.start()
    role.on_welcome = lambda: stopping.append(asyncio.create_task(server.stop(0.0)))
    stopping: list[asyncio.Task[None]] = []
    async with asyncio.timeout(BOUND_S), grpc.aio.insecure_channel(address) as channel:
        call: Stream = worker_pb2_grpc.WorkerStub(channel).Session()
        await call.write(HELLO)

        assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "worker w0 is stopping")
        await stopping[0]
    assert await role.ended.get() == "r0"


async def test_a_port_in_use_is_named(role: RecordingRole) -> None:
    first = WorkerServer(role, config())
    address = await first.start()
    port = int(address.rpartition(":")[2])

    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        await WorkerServer(role, config(port=port)).start()

    await first.stop(0.0)


async def test_watches_of_the_health_take_no_place_of_a_router(role: RecordingRole) -> None:
    async with serving(role, max_sessions=1) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Worker")) for _ in range(MAX_WATCHES)]
        for one in watches:
            await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Worker")).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await open_session(channel)
        for one in watches:
            one.cancel()


async def test_the_health_service_answers(role: RecordingRole) -> None:
    async with serving(role) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="kvrelay.v1.Worker")
        )

        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_lost_its_engine_ends_its_sessions_and_is_not_serving(role: RecordingRole) -> None:
    role.lost = WorkerLost("the engine has stopped")
    async with serving(role) as channel:
        call = await open_session(channel)

        assert await status_of(call) == (grpc.StatusCode.UNAVAILABLE, "the engine has stopped")
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="kvrelay.v1.Worker")
        )
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
