from __future__ import annotations

import random
from typing import Any

import pytest
from decode_link import PROMPT, begin_write, end_write, reserve, start, table_of
from fakes import FakeModel, expected_output
from roles import Router, check_nothing_left, make_config, make_parts, sampling

from decode_worker.worker import DecodeWorker
from engine.errors import DigestMismatch, Draining, LinkClosed, RequestError
from kv_transfer.reservation import WriteGrant
from kvrelay.v1 import worker_pb2
from worker.session import MalformedRequest

OUTPUT = expected_output(PROMPT, 8)


async def test_a_slot_that_is_still_being_written_is_not_reused_after_a_cancel(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    grant = begin_write(worker, ticket, 2)
    await router.cancel("a")
    during = await worker.load()
    end_write(worker, grant)

    assert (during.blocks_quarantined, during.blocks_leased, during.blocks_owned) == (1, 0, 0)
    assert (await router.expect("ended")).error == ""
    assert (await worker.load()).blocks_quarantined == 0


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


@pytest.mark.parametrize("first", ["abort", "cancel"])
async def test_a_transfer_that_ends_because_of_a_cancel_is_no_error(
    worker: DecodeWorker, router: Router, first: str
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    for what in ("abort", "cancel") if first == "abort" else ("cancel", "abort"):
        if what == "abort":
            worker.link_lost([ticket.ticket_id], LinkClosed("the sender aborted the transfer"))
        else:
            await router.cancel("a")

    while not (await router.next()).HasField("ended"):
        pass
    assert dict((await worker.load()).errors) == {}


async def test_a_transfer_that_ends_under_a_request_that_goes_on_is_one_error(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    worker.link_lost([ticket.ticket_id], LinkClosed("gone"))
    await router.expect("handed_over")
    await router.send(start=start())
    await router.expect("step")

    assert dict((await worker.load()).errors) == {"LinkClosed": 1}
    await router.cancel("a")


async def test_a_wrong_block_is_an_error_and_told_of_whatever_becomes_of_the_request(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    ticket = (await router.expect("reserved")).ticket
    worker.block_refused(ticket.ticket_id, 0, DigestMismatch("block 0 is not what was sent"))
    handed_over = await router.expect("handed_over")
    await router.cancel("a")
    await router.expect("ended")

    assert (handed_over.blocks_received, handed_over.blocks_adopted) == (1, 0)
    assert dict((await worker.load()).errors) == {"DigestMismatch": 1}


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


async def test_a_start_with_a_torn_token_ends_the_request_once_and_leaves_nothing(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve())
    await router.expect("reserved")
    await router.send(start=worker_pb2.Start(request_id="a", token_ids=b"\0\0\0\0\0"))

    assert (await router.expect("ended")).error == "RequestError"
    await check_nothing_left(worker)


async def test_messages_about_unknown_requests_do_nothing(worker: DecodeWorker, router: Router) -> None:
    await router.cancel("nobody")
    await router.send(start=start("nobody", [1]))
    worker.blocks_adopted("nobody", [0], 256, "shm")
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
                if (ordinal,) not in [grant.ordinals for grant in grants if grant.ticket_id == ticket.ticket_id]:
                    grants.append(begin_write(worker, ticket, index))
            case 6 if grants:
                end_write(worker, grants.pop(rng.randrange(len(grants))))
            case _:
                await worker.check_integrity()  # lets the engine get ahead

    worker.session_ended(router.session)
    for grant in grants:
        end_write(worker, grant)
    await check_nothing_left(worker)
