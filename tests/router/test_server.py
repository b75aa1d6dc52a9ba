"""The router as clients see it: over a real connection, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from fake_worker import FakeWorker, expected_output
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_fleet import CONFIG

from engine.block_hash import pack_tokens, unpack_tokens
from engine.errors import ConfigError, Draining, EngineError, QueueFull, RequestCancelled, RequestError
from kvrelay._status import from_rpc_error, retry_after
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc
from router.served_model import ServedModel
from router.server import RouterServer

PROMPT = b"hello world"


class Front:
    """A router with one pair of workers, and a client."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.prefill, self.decode = FakeWorker("prefill", "p0"), FakeWorker("decode", "d0")

    async def start(self, **settings: Any) -> None:
        workers = (await self.prefill.start(), await self.decode.start())
        self.server = RouterServer(replace(CONFIG, workers=workers, **settings), self._model)
        self.address = await self.server.start()
        self.channel = grpc.aio.insecure_channel(self.address)
        self.stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(self.channel)
        async with asyncio.timeout(5):
            while len(self.server.registry.snapshots()) < 2:
                await self.server.registry.changed()

    def generate(
        self, timeout: float = 5.0, **fields: Any
    ) -> grpc.aio.UnaryStreamCall[router_pb2.GenerateRequest, router_pb2.GenerateResponse]:
        sampling = common_pb2.SamplingParams(**{"max_tokens": 6} | fields.pop("sampling", {}))
        prompt = fields.pop("prompt", PROMPT)
        request = router_pb2.GenerateRequest(prompt=prompt, sampling=sampling, **fields)
        return self.stub.Generate(request, timeout=timeout)

    async def error(self, **fields: Any) -> EngineError:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            [_ async for _ in self.generate(**fields)]
        return from_rpc_error(raised.value)

    async def idle(self) -> None:
        """Wait until nothing of any request is left."""
        await self.prefill.idle()
        await self.decode.idle()

    async def close(self) -> None:
        await self.channel.close()
        await self.server.stop(grace_s=1.0)
        self.server.dispatcher.admission.check_idle()
        await self.prefill.stop()
        await self.decode.stop()


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[Front]:
    front = Front(model)
    yield front
    await front.close()


async def test_a_stream_is_accepted_then_tokens_then_finished(front: Front) -> None:
    await front.start()
    events = [event async for event in front.generate(request_id="r1")]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "accepted"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"tokens"}
    assert (events[0].accepted.request_id, events[0].accepted.prompt_tokens) == ("r1", 11)
    token_ids = [i for event in events for i in unpack_tokens(event.tokens.token_ids)]
    assert token_ids == expected_output(PROMPT, 6)


async def test_bad_input_is_invalid_argument_with_the_field(front: Front) -> None:
    await front.start()
    error = await front.error(prompt=b"\xff")
    assert isinstance(error, RequestError)
    assert error.field == "prompt"
    error = await front.error(sampling={"temperature": float("nan")})
    assert isinstance(error, RequestError)
    assert error.field == "temperature"
    assert front.decode.all("reserve") == []


async def test_a_full_router_is_resource_exhausted_with_a_retry_hint(front: Front) -> None:
    await front.start(max_live_requests=1, retry_after_s=2.5)
    front.prefill.hold("prefill")
    first = front.generate()
    await front.prefill.reached("prefill")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in front.generate()]
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert isinstance(from_rpc_error(raised.value), QueueFull)
    assert retry_after(raised.value) == 2.5
    front.prefill.release("prefill")
    assert [event async for event in first][-1].HasField("finished")


async def test_closing_the_stream_cancels_everywhere(front: Front) -> None:
    await front.start()
    front.decode.hold(("output", 3))
    call = front.generate()
    async for event in call:
        if event.HasField("tokens"):
            break
    call.cancel()
    await front.decode.got("cancel")
    await front.idle()
    front.server.registry.check_idle()


async def test_a_deadline_of_the_call_cancels_everywhere(front: Front) -> None:
    await front.start()
    front.decode.hold("handed_over")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in front.generate(timeout=0.15)]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await front.idle()


async def test_cancel_by_id_ends_the_stream_with_cancelled_and_is_idempotent(front: Front) -> None:
    await front.start()
    front.decode.hold("handed_over")
    task = asyncio.create_task(front.error(request_id="r1"))
    await front.decode.reached("handed_over")
    assert (await front.stub.Cancel(router_pb2.CancelRequest(request_id="r1"))).found
    assert isinstance(await task, RequestCancelled)
    assert not (await front.stub.Cancel(router_pb2.CancelRequest(request_id="r1"))).found
    await front.idle()


async def test_tokenize_gives_the_ids_that_a_request_would_run_with(front: Front) -> None:
    await front.start()
    response = await front.stub.Tokenize(router_pb2.TokenizeRequest(prompt=b"ab"))
    assert response.token_ids == pack_tokens([97, 98])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await front.stub.Tokenize(router_pb2.TokenizeRequest(prompt=b"ab", model="other"))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_explain_models_and_status_answer(front: Front) -> None:
    await front.start()
    [_ async for _ in front.generate(request_id="r1")]
    explained = await front.stub.Explain(router_pb2.ExplainRequest(request_id="r1"))
    assert (explained.outcome, explained.route.decode_worker) == ("length", "d0")
    assert sum(part.duration_us for part in explained.waterfall.parts) == explained.waterfall.ttft_us
    with pytest.raises(grpc.aio.AioRpcError, match="r2"):
        await front.stub.Explain(router_pb2.ExplainRequest(request_id="r2"))
    (model,) = (await front.stub.ListModels(router_pb2.ListModelsRequest())).models
    assert (model.name, model.max_model_len) == ("fake", 200)
    admin: router_pb2_grpc.AdminAsyncStub = router_pb2_grpc.AdminStub(front.channel)
    status = await admin.Status(router_pb2.StatusRequest())
    assert {worker.worker_id: worker.state for worker in status.workers} == {"p0": "ready", "d0": "ready"}
    assert (status.router_id, status.live_requests, status.requests_total, status.requests_failed) == (
        "router",
        0,
        1,
        0,
    )


async def test_status_says_why_a_worker_is_not_ready(front: Front) -> None:
    await front.start()
    front.server.set_workers({"d9": front.decode.address})
    admin: router_pb2_grpc.AdminAsyncStub = router_pb2_grpc.AdminStub(front.channel)
    async with asyncio.timeout(5):
        while not (worker := (await admin.Status(router_pb2.StatusRequest())).workers[0]).detail.startswith("refused"):
            await front.server.registry.changed()
    assert worker.state == "lost"
    assert "'d0' answers where 'd9' was expected" in worker.detail


async def test_status_still_shows_a_worker_that_was_taken_away(front: Front) -> None:
    await front.start()
    front.server.set_workers({})
    admin: router_pb2_grpc.AdminAsyncStub = router_pb2_grpc.AdminStub(front.channel)
    status = await admin.Status(router_pb2.StatusRequest())
    shown = {worker.worker_id: (worker.role, worker.state) for worker in status.workers}
    assert shown == {"p0": ("prefill", "lost"), "d0": ("decode", "lost")}
    assert all(worker.detail.endswith(" s ago: taken out of service") for worker in status.workers)


async def test_health_is_serving_exactly_while_a_decode_worker_is_ready(front: Front) -> None:
    await front.start()
    stub = health_pb2_grpc.HealthStub(front.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service="kvrelay.v1.Router"), timeout=5)
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    seen = [(await watch.read()).status]
    if seen[-1] == not_serving:
        seen.append((await watch.read()).status)
    assert seen[-1] == serving
    await front.decode.stop()
    assert (await watch.read()).status == not_serving
    await front.decode.start()
    assert (await watch.read()).status == serving
    watch.cancel()


async def test_reflection_lists_the_services(front: Front) -> None:
    await front.start()
    stub = reflection_pb2_grpc.ServerReflectionStub(front.channel)
    call = stub.ServerReflectionInfo(timeout=5)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await call.read()).list_services_response.service}
    assert {"kvrelay.v1.Router", "kvrelay.v1.Admin", "grpc.health.v1.Health"} <= names
    call.cancel()


PREFACE_AND_SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


@pytest.mark.parametrize(
    ("limit", "said", "reason"),
    [
        ("HANDSHAKE_TIMEOUT_S", b"", b"Did not receive HTTP/2 settings"),
        ("IDLE_TIMEOUT_S", PREFACE_AND_SETTINGS, b"connection idle"),
    ],
)
async def test_a_connection_that_says_nothing_is_told_why_and_closed(
    front: Front, monkeypatch: pytest.MonkeyPatch, limit: str, said: bytes, reason: bytes
) -> None:
    monkeypatch.setattr(f"kvrelay._server.{limit}", 0.2)
    await front.start()
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*front.address.split(":"))
        writer.write(said)
        assert reason in await reader.read()
        writer.close()


async def test_watches_of_the_health_are_bounded(front: Front) -> None:
    await front.start(max_live_requests=2)
    watch = health_pb2_grpc.HealthStub(front.channel).Watch
    async with asyncio.timeout(20):
        watches = [watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for each in watches:
            await each.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await watch(health_pb2.HealthCheckRequest()).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in watches:
            each.cancel()


async def test_a_port_in_use_is_named_and_nothing_stays_open(front: Front, model: ServedModel) -> None:
    await front.start()
    port = int(front.address.rpartition(":")[2])
    second = RouterServer(replace(CONFIG, port=port), model)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"):
        await second.start()
    await second.stop(grace_s=0.0)


async def test_a_stop_says_not_serving_and_lets_live_requests_finish(front: Front) -> None:
    await front.start()
    front.decode.hold("handed_over")
    call = front.generate()
    await front.decode.reached("handed_over")
    watch = health_pb2_grpc.HealthStub(front.channel).Watch(health_pb2.HealthCheckRequest(), timeout=5)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.create_task(front.server.stop(grace_s=5.0))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()
    front.decode.release("handed_over")
    events = [event async for event in call]
    assert events[-1].HasField("finished")
    await stopping


async def test_a_stop_tells_what_outlasts_the_grace_that_it_is_stopping(front: Front) -> None:
    await front.start()
    front.decode.hold("handed_over")
    call = front.generate()
    await front.decode.reached("handed_over")
    await front.server.stop(grace_s=0.05)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in call]
    assert isinstance(from_rpc_error(raised.value), Draining)
    await front.idle()
    front.server.dispatcher.admission.check_idle()


async def test_a_message_over_the_size_limit_is_refused_before_it_is_read(front: Front) -> None:
    await front.start(max_request_bytes=1000)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in front.generate(prompt=b"x" * 2000)]
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    error = from_rpc_error(raised.value)
    assert isinstance(error, RequestError)
    assert re.fullmatch(r"request: at most 1000 bytes in one message, got 2\d\d\d", str(error))
