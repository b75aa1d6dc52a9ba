from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import FakeModel, expected_output
from roles import Router, check_nothing_left, fill, make_config, make_parts, sampling

from decode_worker.worker import DecodeWorker
from engine.block_hash import pack_tokens
from engine.errors import Draining, LinkClosed, RequestError, TransferError
from kv_transfer.reservation import ReservationTable, WriteGrant, WriteOutcome
from kvrelay.v1 import worker_pb2
from worker.session import MalformedRequest

PROMPT = list(range(100, 122))
BLOCKS = 6
"""Of `PROMPT`, 4 tokens each; the last holds 2."""
OUTPUT = expected_output(PROMPT, 8)


@pytest.fixture
async def worker() -> AsyncIterator[DecodeWorker]:
    worker = DecodeWorker(make_config(), make_parts())
    await worker.start()
    yield worker
    await check_nothing_left(worker)
    await worker.stop()


@pytest.fixture
async def router(worker: DecodeWorker) -> Router:
    return Router(worker)


def reserve(request_id: str = "a", tokens: list[int] = PROMPT, **fields: Any) -> worker_pb2.Reserve:
    message: worker_pb2.Reserve = fill(worker_pb2.Reserve(), request_id, tokens, **fields)
    return message


def start(request_id: str = "a", tokens: list[int] | None = None) -> worker_pb2.Start:
    """Without tokens: compute what is missing."""
    packed = pack_tokens(tokens or [])
    return worker_pb2.Start(request_id=request_id, token_ids=packed, compute_missing=not tokens)


def table_of(worker: DecodeWorker) -> ReservationTable:
    return worker._table


def begin_write(worker: DecodeWorker, ticket: worker_pb2.Ticket, index: int, content_hash: bytes) -> WriteGrant:
    """As a link does when a block's frame has come."""
    return table_of(worker).begin_write(
        ticket.ticket_id,
        ticket.incarnation,
        ticket.ordinals[index],
        ticket.slots[index],
        ticket.generations[index],
        content_hash,
    )


def expected_hash(worker: DecodeWorker, ticket: worker_pb2.Ticket, index: int) -> bytes:
    return table_of(worker)._open[ticket.ticket_id].blocks[ticket.ordinals[index]].hash


def write(worker: DecodeWorker, ticket: worker_pb2.Ticket, index: int) -> WriteGrant:
    return begin_write(worker, ticket, index, expected_hash(worker, ticket, index))


def end_write(worker: DecodeWorker, grant: WriteGrant) -> WriteOutcome:
    """As a link does, with what it tells the worker then."""
    outcome = table_of(worker).end_write(grant, ok=True)
    if outcome is WriteOutcome.LATE:
        worker.writes_quiet(grant.ticket_id, [grant.slot])
    elif outcome is WriteOutcome.ADOPTED:
        worker.block_adopted(grant.ticket_id, grant.ordinal, 256, "shm")
    return outcome


async def test_a_reservation_names_every_missing_block_and_its_slot(worker: DecodeWorker, router: Router) -> None:
    await router.send(reserve=reserve())

    reserved = await router.expect("reserved")

    ticket = reserved.ticket
    assert list(ticket.ordinals) == list(range(BLOCKS))
    assert len(set(ticket.slots)) == len(ticket.generations) == BLOCKS
    assert (ticket.worker_id, ticket.incarnation, ticket.lease_ms) == ("w0", worker.welcome().incarnation, 5000)
    assert (await worker.load()).blocks_leased == BLOCKS
    await router.cancel("a")


async def test_it_starts_when_all_blocks_are_adopted_and_not_before(worker: DecodeWorker, router: Router) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    await router.send(start=start(tokens=OUTPUT[:1]))
    for index in (5, 0, 3, 2, 1):
        end_write(worker, write(worker, ticket, index))
    await worker.check_integrity()  # the engine has heard of all five
    before = await worker.load()
    end_write(worker, write(worker, ticket, 4))

    handed_over = await router.expect("handed_over")

    assert (before.running, before.blocks_leased) == (0, 1)
    assert (handed_over.error, handed_over.recomputed_tokens) == ("", 0)
    assert table_of(worker).progress(ticket.ticket_id) is None
    await router.expect("step")
    await router.cancel("a")


async def test_a_lease_that_nobody_renews_ends_and_the_prompt_is_computed_here() -> None:
    worker = DecodeWorker(make_config(lease_s=0.05), make_parts())
    await worker.start()
    router = Router(worker)
    await router.send(reserve=reserve())
    await router.expect("reserved")

    handed_over = await router.expect("handed_over")
    await router.send(start=start(tokens=OUTPUT[:1]))

    assert "lease ran out" in handed_over.error
    assert handed_over.recomputed_tokens == len(PROMPT)
    assert await router.tokens(7) == OUTPUT[1:]
    assert (await router.expect("ended")).error == ""
    load = await check_nothing_left(worker)
    assert load.errors["LinkClosed"] == 1
    await worker.stop()


@pytest.mark.parametrize("how", ["router", "link", "refused"])
async def test_whoever_says_that_no_more_blocks_come_the_rest_is_computed_here(
    worker: DecodeWorker, router: Router, how: str
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    if how == "link":
        worker.link_lost([ticket.ticket_id], LinkClosed("gone"))
    elif how == "refused":
        worker.block_refused(ticket.ticket_id, 0, TransferError("bad"))
    await router.send(start=start())

    assert (await router.expect("handed_over")).error != ""
    assert await router.tokens(8) == OUTPUT
    assert (await router.expect("ended")).error == ""


async def test_a_transfer_given_up_before_there_were_blocks_gets_no_ticket(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve("hog", list(range(110))))
    await router.expect("reserved")
    await router.send(reserve=reserve("a"))
    await router.send(start=start("a"))
    await router.cancel("hog")

    seen = [await router.next() for _ in range(3)]

    (reserved,) = [message.reserved for message in seen if message.HasField("reserved")]
    assert list(reserved.ticket.ordinals) == []
    (handed_over,) = [message.handed_over for message in seen if message.HasField("handed_over")]
    assert handed_over.recomputed_tokens == len(PROMPT)
    assert await router.tokens(8) == OUTPUT


async def test_the_prompt_is_not_computed_into_a_slot_that_is_still_being_written(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    grant = write(worker, ticket, 2)
    await router.send(start=start())
    await worker.check_integrity()
    waiting = await worker.load()

    assert (waiting.running, waiting.blocks_leased) == (0, BLOCKS)
    assert end_write(worker, grant) is WriteOutcome.LATE
    assert (await router.expect("handed_over")).recomputed_tokens == len(PROMPT)
    assert await router.tokens(8) == OUTPUT


async def test_a_slot_that_is_still_being_written_is_not_reused_after_a_cancel(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    grant = write(worker, ticket, 2)
    await router.cancel("a")
    during = await worker.load()
    end_write(worker, grant)

    assert (during.blocks_quarantined, during.blocks_leased, during.blocks_owned) == (1, 0, 0)
    assert (await router.expect("ended")).error == ""
    assert (await worker.load()).blocks_quarantined == 0


async def test_an_arrival_that_crosses_with_a_give_up_counts_as_not_arrived(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve("a", PROMPT[:3]))
    ticket = (await router.expect("reserved")).ticket
    grant = write(worker, ticket, 0)
    table_of(worker).end_write(grant, ok=True)  # adopted, but the worker was not told yet
    await router.send(start=start())
    worker.block_adopted(ticket.ticket_id, 0, 256, "shm")

    assert (await router.expect("handed_over")).recomputed_tokens == 3
    assert await router.tokens(8) == expected_output(PROMPT[:3], 8)


@pytest.mark.parametrize("stage", ["sent", "reserved", "handed over", "decoding"])
async def test_a_cancel_at_any_stage_leaves_nothing(worker: DecodeWorker, router: Router, stage: str) -> None:
    await router.send(reserve=reserve(sampling=sampling(max_tokens=60)))
    if stage != "sent":
        await router.expect("reserved")
    if stage in ("handed over", "decoding"):
        await router.send(start=start())
        await router.expect("handed_over")
    if stage == "decoding":
        await router.expect("step")
    await router.cancel("a")
    await router.cancel("a")

    messages = [await router.next()]
    while not messages[-1].HasField("ended"):
        messages.append(await router.next())

    assert messages[-1].ended.error == ""


async def test_the_deadline_ends_a_request_that_waits_for_blocks(worker: DecodeWorker, router: Router) -> None:
    await router.send(reserve=reserve("hog", list(range(110))))
    await router.expect("reserved")
    await router.send(reserve=reserve("a", timeout_ms=30))

    ended = await router.expect("ended")

    assert (ended.request_id, ended.error, ended.retryable) == ("a", "DeadlineExceeded", False)
    await router.cancel("hog")


async def test_the_end_of_a_session_ends_its_requests_and_no_others(worker: DecodeWorker, router: Router) -> None:
    other = Router(worker, "r1")
    for one in (router, other):
        await one.send(reserve=reserve())  # the same id on another session is another request
        await one.expect("reserved")

    worker.session_ended(router.session)

    await other.send(start=start())
    assert (await other.expect("handed_over")).blocks_adopted == 0
    assert await other.tokens(8) == OUTPUT


async def test_a_request_computed_here_answers_with_an_empty_ticket_and_all_tokens(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve(compute_here=True))

    reserved = await router.expect("reserved")

    assert list(reserved.ticket.ordinals) == []
    assert await router.tokens(8) == OUTPUT
    assert (await router.expect("ended")).error == ""


async def test_a_request_computed_here_tells_what_the_prefix_cache_had(worker: DecodeWorker, router: Router) -> None:
    for cached_tokens in (0, 20):
        await router.send(reserve=reserve(compute_here=True))
        assert (await router.expect("reserved")).ticket.cached_tokens == cached_tokens
        assert await router.tokens(8) == OUTPUT
        await router.expect("ended")


async def test_a_resumed_request_continues_at_the_next_index(worker: DecodeWorker, router: Router) -> None:
    message = reserve("a", PROMPT + OUTPUT[:3], num_prompt_tokens=len(PROMPT), compute_here=True)
    await router.send(reserve=message)
    await router.expect("reserved")

    step = await router.expect("step")

    assert (step.outputs[0].output.index, step.outputs[0].output.token_id) == (3, OUTPUT[3])
    assert await router.tokens(4) == OUTPUT[4:]


async def test_one_step_is_one_message_for_each_router() -> None:
    model = FakeModel()
    worker = DecodeWorker(make_config(), make_parts(model, max_num_batched_tokens=64))
    await worker.start()
    routers = [Router(worker, "r0"), Router(worker, "r1")]
    for name in "ab":
        for router in routers:
            await router.send(reserve=reserve(name, compute_here=True))
    for router in routers:
        steps: list[int] = []
        while len(steps) < 8:
            message = await router.next()
            if message.HasField("step"):
                steps.append(len(message.step.outputs))
        assert sum(steps) <= 16
        assert max(steps) == 2
    await check_nothing_left(worker)
    await worker.stop()


async def test_a_fault_of_the_model_ends_the_request_with_its_cause() -> None:
    model = FakeModel()
    model.fault = RuntimeError("broken")
    worker = DecodeWorker(make_config(), make_parts(model))
    await worker.start()
    router = Router(worker)
    await router.send(reserve=reserve(compute_here=True))

    ended = await router.expect("ended")

    assert ended.error == "InternalError"
    assert "broken" in ended.message
    await check_nothing_left(worker)
    await worker.stop()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": b"\0\0\0"}, "prompt_token_ids"),
        ({"token_ids": b""}, "prompt_token_ids"),
        ({"num_prompt_tokens": 23}, "num_prompt_tokens"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"scope": bytes(257)}, "scope"),
        ({"sampling": sampling(top_p=0.0)}, "top_p"),
    ],
)
async def test_a_request_that_cannot_be_meant_is_refused_and_leaves_nothing(
    worker: DecodeWorker, router: Router, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await router.send(reserve=reserve(**fields))

    assert caught.value.field == field


@pytest.mark.parametrize(("tokens", "max_tokens"), [([1] * 120, 10), ([600], 10), ([1], 3000)])
async def test_a_request_that_can_never_be_served_ends_with_the_limit(
    worker: DecodeWorker, router: Router, tokens: list[int], max_tokens: int
) -> None:
    await router.send(reserve=reserve("a", tokens, sampling=sampling(max_tokens=max_tokens)))

    ended = await router.expect("ended")

    assert (ended.error, ended.retryable) == ("RequestError", False)


@pytest.mark.parametrize("tokens", [[600], [1] * 9])
async def test_a_start_with_impossible_tokens_ends_the_request(
    worker: DecodeWorker, router: Router, tokens: list[int]
) -> None:
    await router.send(reserve=reserve())
    await router.expect("reserved")
    await router.send(start=start(tokens=tokens))

    assert (await router.expect("ended")).error == "RequestError"


async def test_a_start_that_says_nothing_ends_the_request(worker: DecodeWorker, router: Router) -> None:
    await router.send(reserve=reserve())
    await router.expect("reserved")
    await router.send(start=worker_pb2.Start(request_id="a"))

    ended = await router.expect("ended")

    assert ended.error == "RequestError"
    assert "compute_missing" in ended.message


async def test_messages_about_unknown_requests_do_nothing(worker: DecodeWorker, router: Router) -> None:
    await router.cancel("nobody")
    await router.send(start=start("nobody", [1]))
    worker.block_adopted("nobody", 0, 256, "shm")
    worker.link_lost(["nobody"], LinkClosed("gone"))
    worker.writes_quiet("nobody", [3])
    await worker.check_integrity()

    assert (await worker.load()).blocks_free == 32


async def test_a_request_id_in_use_breaks_the_protocol(worker: DecodeWorker, router: Router) -> None:
    await router.send(reserve=reserve("a"))

    with pytest.raises(MalformedRequest, match="'a' is in use"):
        await router.send(reserve=reserve("a"))

    await router.cancel("a")


async def test_a_message_for_the_other_role_is_refused(worker: DecodeWorker, router: Router) -> None:
    with pytest.raises(RequestError, match="takes reserve, start and cancel, got prefill"):
        await router.send(prefill=worker_pb2.Prefill(request_id="a"))


async def test_a_draining_worker_refuses_and_says_so(worker: DecodeWorker, router: Router) -> None:
    await worker.drain(0.0)

    with pytest.raises(Draining, match="w0 is stopping"):
        await router.send(reserve=reserve())


@pytest.mark.parametrize("seed", range(10))
async def test_no_order_of_events_loses_a_block(worker: DecodeWorker, router: Router, seed: int) -> None:
    rng = random.Random(seed)
    prefix = [rng.randrange(500) for _ in range(20)]
    tickets: dict[str, worker_pb2.Ticket] = {}
    grants: list[WriteGrant] = []
    for number in range(80):
        while router.session._outbox:
            message = await router.next()
            if message.HasField("reserved"):
                tickets[message.reserved.request_id] = message.reserved.ticket
        open_tickets = {name: t for name, t in tickets.items() if table_of(worker).missing(t.ticket_id)}
        match rng.randrange(8):
            case 0 | 1:
                tokens = prefix[: rng.randint(1, 20)] + [rng.randrange(500) for _ in range(rng.randint(1, 12))]
                await router.send(reserve=reserve(str(number), tokens, compute_here=rng.random() < 0.2))
            case 2:
                await router.send(start=start(str(rng.randrange(number + 1)), rng.choice([None, [7]])))
            case 3:
                await router.cancel(str(rng.randrange(number + 1)))
            case 4 | 5 if open_tickets:
                ticket = open_tickets[rng.choice(list(open_tickets))]
                ordinal = rng.choice(table_of(worker).missing(ticket.ticket_id))
                index = list(ticket.ordinals).index(ordinal)
                if ordinal not in [grant.ordinal for grant in grants if grant.ticket_id == ticket.ticket_id]:
                    grants.append(write(worker, ticket, index))
            case 6 if grants:
                end_write(worker, grants.pop(rng.randrange(len(grants))))
            case _:
                await worker.check_integrity()  # lets the engine get ahead

    worker.session_ended(router.session)
    for grant in grants:
        end_write(worker, grant)
    await check_nothing_left(worker)
