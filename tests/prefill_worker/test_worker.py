from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import FakeModel, expected_output
from roles import BLOCK_SIZE, ManualSender, Router, check_nothing_left, fill, make_config, make_parts, sampling

from engine.block_hash import block_chain, pack_tokens
from engine.errors import Draining, LinkClosed, RequestError
from kvrelay.v1 import worker_pb2
from prefill_worker.worker import PrefillWorker
from worker.session import MalformedRequest

PROMPT = list(range(100, 122))
BLOCKS = 6
"""Of `PROMPT`, 4 tokens each; the last holds 2."""


@pytest.fixture
async def worker(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PrefillWorker]:
    monkeypatch.setattr("prefill_worker.worker.KvSender", ManualSender)
    worker = PrefillWorker(make_config(), make_parts())
    await worker.start()
    yield worker
    await check_nothing_left(worker)
    await worker.stop()


@pytest.fixture
async def router(worker: PrefillWorker) -> Router:
    return Router(worker)


def sender_of(worker: PrefillWorker) -> ManualSender:
    sender = worker._sender
    assert isinstance(sender, ManualSender)
    return sender


def only_key(worker: PrefillWorker) -> str:
    (key,) = sender_of(worker).open_transfers
    return key


def prefill(
    request_id: str = "a", tokens: list[int] = PROMPT, ordinals: list[int] | None = None, **fields: Any
) -> worker_pb2.Prefill:
    wanted = list(range(-(-len(tokens) // BLOCK_SIZE))) if ordinals is None else ordinals
    ticket = worker_pb2.Ticket(
        ticket_id=f"ticket-{request_id}",
        worker_id="d0",
        incarnation="i0",
        link_endpoint=b"unused",
        lease_ms=5000,
        ordinals=wanted,
        slots=wanted,
        generations=[1] * len(wanted),
    )
    message: worker_pb2.Prefill = fill(worker_pb2.Prefill(), request_id, tokens, **{"ticket": ticket} | fields)
    return message


async def stats(worker: PrefillWorker) -> worker_pb2.Load:
    return await worker.load()


async def test_the_first_token_does_not_wait_for_the_transfer(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill())

    prefilled = await router.expect("prefilled")

    assert (prefilled.output.index, prefilled.output.token_id) == (0, expected_output(PROMPT, 1)[0])
    assert (prefilled.cached_tokens, prefilled.blocks_computed) == (0, BLOCKS)
    sender_of(worker).end(only_key(worker))
    assert (await router.expect("ended")).error == ""


async def test_the_transfer_is_opened_before_anything_is_computed(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill())

    assert sender_of(worker).open_transfers[only_key(worker)].ticket_id == "ticket-a"

    await router.cancel("a")


async def test_every_wanted_block_is_sent_once_with_its_chain_hash(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill(ordinals=[1, 2, 5]))
    await router.expect("prefilled")
    key = only_key(worker)
    chain = block_chain(worker._identity.root(b""), pack_tokens(PROMPT), BLOCK_SIZE)
    await worker.check_integrity()  # the engine thread is past the step that finished the transfer

    sent = sender_of(worker).sent[key]

    assert [(block.ordinal, block.hash) for block in sent] == [(i, chain[i]) for i in (1, 2, 5)]
    assert key in sender_of(worker).finished
    sender_of(worker).end(key)


async def test_each_block_is_digested_once_when_it_is_full(worker: PrefillWorker, router: Router) -> None:
    for request_id in "ab":
        await router.send(prefill=prefill(request_id))
        await router.expect("prefilled")
        await worker.check_integrity()
        sender_of(worker).end(only_key(worker))
        await router.expect("ended")

    digested = sender_of(worker).digested

    assert len(digested) == len(PROMPT) // BLOCK_SIZE
    assert set(digested) == {(block, worker._core.parts.engine.generation(block)) for block, _ in digested}


async def test_a_prompt_whose_cached_block_is_damaged_is_not_computed_from_it(
    worker: PrefillWorker, router: Router
) -> None:
    await router.send(prefill=prefill("a"))
    await router.expect("prefilled")
    await worker.check_integrity()
    sender, key = sender_of(worker), only_key(worker)
    third = sender.sent[key][2]
    sender.damaged.add(third.source_block)
    worker.block_doubted(third)
    sender.end(key)
    await router.expect("ended")

    await router.send(prefill=prefill("b"))

    assert (await router.expect("prefilled")).cached_tokens == 2 * BLOCK_SIZE
    assert (await stats(worker)).errors["BlocksDamaged"] == 1
    await worker.check_integrity()
    sender.end(only_key(worker))


async def test_blocks_are_held_until_the_transfer_is_over_and_cached_after_it(
    worker: PrefillWorker, router: Router
) -> None:
    await router.send(prefill=prefill())
    await router.expect("prefilled")
    held = await stats(worker)
    sender_of(worker).end(only_key(worker))
    await router.expect("ended")
    after = await stats(worker)

    assert held.blocks_owned == BLOCKS
    assert (after.blocks_owned, after.blocks_cached) == (0, BLOCKS - 1)


async def test_a_cached_prefix_is_sent_and_not_computed(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill("a"))
    await router.expect("prefilled")
    sender_of(worker).end(only_key(worker))
    await router.expect("ended")
    await router.send(prefill=prefill("b", [*PROMPT[:20], 7]))

    prefilled = await router.expect("prefilled")

    assert (prefilled.cached_tokens, prefilled.blocks_computed) == (20, 1)
    await worker.check_integrity()
    assert len(sender_of(worker).sent[only_key(worker)]) == BLOCKS
    sender_of(worker).end(only_key(worker))


async def test_a_ticket_that_asks_for_nothing_needs_no_transfer(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill(ordinals=[]))

    await router.expect("prefilled")
    ended = await router.expect("ended")

    assert (ended.request_id, ended.error) == ("a", "")
    assert sender_of(worker).sent == {}


async def test_a_failed_transfer_still_yields_the_first_token_and_then_its_error(
    worker: PrefillWorker, router: Router
) -> None:
    await router.send(prefill=prefill())
    sender_of(worker).end(only_key(worker), LinkClosed("gone"))

    prefilled = await router.expect("prefilled")
    ended = await router.expect("ended")

    assert prefilled.output.token_id == expected_output(PROMPT, 1)[0]
    assert (ended.error, ended.message, ended.retryable) == ("LinkClosed", "gone", True)


async def test_blocks_of_a_cancelled_prompt_are_not_reused_while_the_sender_may_read_them(
    worker: PrefillWorker, router: Router
) -> None:
    await router.send(prefill=prefill())
    await router.expect("prefilled")
    key = only_key(worker)
    sender_of(worker).lingers = True
    await router.cancel("a")
    during = await stats(worker)

    assert key in sender_of(worker).aborted
    assert (during.blocks_owned, during.blocks_quarantined) == (0, BLOCKS)
    sender_of(worker).end_aborted()
    assert (await router.expect("ended")).error == ""
    assert (await stats(worker)).blocks_quarantined == 0


async def test_the_end_of_a_session_cancels_what_it_started_and_nothing_else(
    worker: PrefillWorker, router: Router
) -> None:
    other = Router(worker, "r1")
    await router.send(prefill=prefill("a"))
    await other.send(prefill=prefill("a"))  # the same id on another session is another request
    mine, others = sender_of(worker).open_transfers

    worker.session_ended(router.session)

    assert sender_of(worker).aborted == {mine}
    await other.expect("prefilled")
    sender_of(worker).end(others)
    assert (await other.expect("ended")).error == ""


async def test_the_deadline_stops_a_prompt_whatever_the_transfer_does(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill(timeout_ms=50))

    message = await router.next()
    if message.HasField("prefilled"):  # not on a very busy machine
        message = await router.next()

    assert message.ended.error == "DeadlineExceeded"


async def test_a_fault_of_the_model_ends_the_prompt_and_aborts_its_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.worker.KvSender", ManualSender)
    model = FakeModel()
    model.fault = RuntimeError("broken")
    worker = PrefillWorker(make_config(), make_parts(model))
    await worker.start()
    router = Router(worker)
    await router.send(prefill=prefill())

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
        ({"sampling": sampling(temperature=-1.0)}, "temperature"),
        ({"ordinals": [BLOCKS]}, "ticket"),
        ({"ordinals": [1, 0]}, "ticket"),
        ({"ticket": worker_pb2.Ticket(ordinals=[0], slots=[1])}, "ticket"),
    ],
)
async def test_a_prompt_that_cannot_be_meant_is_refused_and_leaves_nothing(
    worker: PrefillWorker, router: Router, fields: dict[str, Any], field: str
) -> None:
    message = prefill(**fields)

    with pytest.raises(RequestError) as caught:
        await router.send(prefill=message)

    assert caught.value.field == field
    assert sender_of(worker).open_transfers == {}


async def test_a_prompt_that_can_never_fit_ends_with_the_limit(worker: PrefillWorker, router: Router) -> None:
    tokens = [1] * (33 * BLOCK_SIZE)
    await router.send(prefill=prefill(tokens=tokens))

    ended = await router.expect("ended")

    assert ended.error == "RequestError"
    assert "the pool has 32" in ended.message


async def test_a_request_id_in_use_breaks_the_protocol(worker: PrefillWorker, router: Router) -> None:
    await router.send(prefill=prefill("a"))

    with pytest.raises(MalformedRequest, match="'a' is in use"):
        await router.send(prefill=prefill("a"))

    await router.cancel("a")


async def test_a_draining_worker_refuses_and_says_so(worker: PrefillWorker, router: Router) -> None:
    await worker.drain(0.0)

    with pytest.raises(Draining, match="w0 is stopping"):
        await router.send(prefill=prefill("a"))


async def test_a_cancel_of_an_unknown_request_does_nothing(worker: PrefillWorker, router: Router) -> None:
    await router.cancel("nobody")

    assert (await stats(worker)).blocks_free == 32


@pytest.mark.parametrize("seed", range(10))
async def test_no_order_of_events_loses_a_block(worker: PrefillWorker, router: Router, seed: int) -> None:
    rng = random.Random(seed)
    sender = sender_of(worker)
    sender.lingers = True
    prefix = [rng.randrange(500) for _ in range(20)]
    for number in range(60):
        match rng.randrange(6):
            case 0 | 1:
                tokens = prefix[: rng.randint(1, 20)] + [rng.randrange(500) for _ in range(rng.randint(1, 12))]
                wanted = sorted(rng.sample(range(-(-len(tokens) // BLOCK_SIZE)), rng.randint(0, len(tokens) // 4)))
                await router.send(prefill=prefill(str(number), tokens, wanted))
            case 2:
                await router.cancel(str(rng.randrange(number + 1)))
            case 3 if sender.open_transfers:
                sender.end(rng.choice(list(sender.open_transfers)), rng.choice([None, LinkClosed("gone")]))
            case 4:
                sender.end_aborted()
            case _:
                await worker.check_integrity()  # lets the engine get ahead

    worker.session_ended(router.session)
    sender.end_aborted()
    await check_nothing_left(worker)
