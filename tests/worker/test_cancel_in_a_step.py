"""What is cancelled while the engine computes is over after that step, and costs no other one. Both roles."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from decode_link import PROMPT, reserve
from pausing_model import PausingModel
from roles import ManualSender, Router, check_nothing_left, fill, make_config, make_parts, sampling

from decode_worker.worker import DecodeWorker
from kvrelay.v1 import worker_pb2
from prefill_worker.worker import PrefillWorker


@pytest.fixture
def model() -> PausingModel:
    """Three steps a prompt, by `make_parts`."""
    return PausingModel()


@pytest.fixture
async def decode(model: PausingModel) -> AsyncIterator[DecodeWorker]:
    worker = DecodeWorker(make_config(), make_parts(model))
    await worker.start()
    yield worker
    await check_nothing_left(worker)
    await worker.stop()


@pytest.fixture
async def prefill(model: PausingModel, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PrefillWorker]:
    monkeypatch.setattr("prefill_worker.worker.KvSender", ManualSender)
    worker = PrefillWorker(make_config(), make_parts(model))
    await worker.start()
    yield worker
    await check_nothing_left(worker)
    await worker.stop()


def prompt(request_id: str) -> worker_pb2.Prefill:
    ticket = worker_pb2.Ticket(
        ticket_id=request_id,
        worker_id="d0",
        incarnation="i0",
        link_endpoint=b"unused",
        lease_ms=5000,
        ordinals=[0],
        slots=[0],
        generations=[1],
    )
    message: worker_pb2.Prefill = fill(worker_pb2.Prefill(), request_id, PROMPT, ticket=ticket)
    return message


async def ended(router: Router, count: int) -> set[str]:
    """Ids of the next messages, which must all be last words without an error."""
    words = [await router.expect("ended") for _ in range(count)]
    assert not any(word.error for word in words)
    return {word.request_id for word in words}


async def test_a_prompt_gets_no_second_chunk(prefill: PrefillWorker, model: PausingModel) -> None:
    router = Router(prefill)
    model.pause_at(0)
    await router.send(prefill=prompt("computed"))
    await model.paused()
    await router.send(prefill=prompt("waiting"))
    assert model.control is not None
    assert not model.control.stop
    for request_id in ("computed", "waiting"):
        await router.cancel(request_id)
    assert model.control.stop
    model.go_on()

    assert await ended(router, 2) == {"computed", "waiting"}
    assert model.num_forwards == 1


async def test_a_transfer_that_ends_within_the_step_costs_no_other_one(
    prefill: PrefillWorker, model: PausingModel
) -> None:
    router, sender = Router(prefill), prefill._sender
    assert isinstance(sender, ManualSender)
    sender.lingers = True
    model.pause_at(0)
    await router.send(prefill=prompt("a"))
    await model.paused()
    await router.cancel("a")
    sender.end_aborted()
    await asyncio.sleep(0)  # the worker hears of it
    model.go_on()

    assert await ended(router, 1) == {"a"}
    assert model.num_forwards == 1


async def test_whatever_a_decode_worker_holds_is_over_after_the_step(decode: DecodeWorker, model: PausingModel) -> None:
    router = Router(decode)
    await router.send(reserve=reserve("ticket"))
    await router.expect("reserved")
    model.pause_at(0)
    await router.send(reserve=reserve("computed", compute_here=True, sampling=sampling(max_tokens=60)))
    await model.paused()
    await router.send(reserve=reserve("waiting"))
    for request_id in ("ticket", "computed", "waiting"):
        await router.cancel(request_id)
    model.go_on()

    assert await ended(router, 3) == {"ticket", "computed", "waiting"}
    assert model.num_forwards == 1


async def test_a_stream_draws_no_further_token(decode: DecodeWorker, model: PausingModel) -> None:
    router = Router(decode)
    model.pause_at(5)  # three chunks, two tokens more
    await router.send(reserve=reserve("a", compute_here=True, sampling=sampling(max_tokens=60)))
    await model.paused()
    await router.expect("reserved")
    await router.tokens(3)
    await router.cancel("a")
    assert model.control is not None
    assert model.control.stop
    model.go_on()

    assert await ended(router, 1) == {"a"}
    assert model.num_forwards == 6
