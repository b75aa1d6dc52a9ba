from __future__ import annotations

import pytest
from decode_link import BLOCKS, PROMPT, begin_write, end_write, reserve, start, table_of
from fakes import expected_output
from pausing_model import PausingModel
from roles import Router, check_nothing_left, make_config, make_parts, sampling

from decode_worker.worker import DecodeWorker
from engine.block_hash import unpack_tokens
from engine.errors import LinkClosed, TransferError
from kv_transfer.reservation import WriteOutcome

OUTPUT = expected_output(PROMPT, 8)


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
        end_write(worker, begin_write(worker, ticket, index))
    await worker.check_integrity()  # the engine has heard of all five
    before = await worker.load()
    end_write(worker, begin_write(worker, ticket, 4))

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
    grant = begin_write(worker, ticket, 2)
    await router.send(start=start())
    await worker.check_integrity()
    waiting = await worker.load()

    assert (waiting.running, waiting.blocks_leased) == (0, BLOCKS)
    assert end_write(worker, grant) is WriteOutcome.LATE
    assert (await router.expect("handed_over")).recomputed_tokens == len(PROMPT)
    assert await router.tokens(8) == OUTPUT


async def test_an_arrival_that_crosses_with_a_give_up_counts_as_not_arrived(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve("a", PROMPT[:3]))
    ticket = (await router.expect("reserved")).ticket
    grant = begin_write(worker, ticket, 0)
    table_of(worker).end_write(grant, [True])  # adopted, but the worker was not told yet
    await router.send(start=start())
    worker.blocks_adopted(ticket.ticket_id, [0], 256, "shm")

    assert (await router.expect("handed_over")).recomputed_tokens == 3
    assert await router.tokens(8) == expected_output(PROMPT[:3], 8)


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


async def test_outputs_of_a_request_with_a_lane_come_in_columns_those_with_logprobs_do_not(router: Router) -> None:
    await router.send(reserve=reserve("a", PROMPT, compute_here=True, lane=7))
    await router.send(reserve=reserve("b", PROMPT, compute_here=True, lane=8, sampling=sampling(logprobs=1)))
    told: dict[int, list[int]] = {7: [], 8: []}
    for _ in range(20):
        message = await router.next()
        step = message.step
        for lane, index, token_id, reason in zip(
            unpack_tokens(step.columns.lanes),
            unpack_tokens(step.columns.indexes),
            unpack_tokens(step.columns.token_ids),
            step.columns.finish_reasons,
            strict=True,
        ):
            assert (lane, index, reason) == (7, len(told[7]), 2 if index == 7 else 0)
            told[7].append(token_id)
        told[8] += [entry.output.token_id for entry in step.outputs if entry.request_id == "b"]
        if told == {7: OUTPUT, 8: OUTPUT}:
            return
    raise AssertionError(told)


async def test_a_slot_that_became_free_because_its_content_was_here_already_is_granted_again(
    worker: DecodeWorker, router: Router
) -> None:
    await router.send(reserve=reserve("a"))
    ticket = (await router.expect("reserved")).ticket
    await router.send(reserve=reserve("b", compute_here=True))  # the same prompt: its blocks are found by hash first
    await router.expect("reserved")
    await router.tokens(8)
    await router.expect("ended")
    end_write(worker, begin_write(worker, ticket, 0))
    await worker.check_integrity()  # the engine has heard of it, and uses the block that was here

    await router.send(reserve=reserve("c", list(range(300, 304))))

    assert (await router.expect("reserved")).ticket.slots[0] == ticket.slots[0]
    await router.cancel("a")
    await router.cancel("c")


async def test_one_step_is_one_message_for_each_router() -> None:
    model = PausingModel()
    worker = DecodeWorker(make_config(), make_parts(model, max_num_batched_tokens=64))
    await worker.start()
    routers = [Router(worker, "r0"), Router(worker, "r1")]
    model.pause_at(0)  # so that all four run in the same steps, but for the first
    for name in "ab":
        for router in routers:
            await router.send(reserve=reserve(name, compute_here=True))
    await model.paused()
    model.go_on()
    await check_nothing_left(worker)

    for router in routers:
        messages = [await router.next() for _ in range(len(router.session._outbox))]
        steps = [message.step for message in messages if message.HasField("step")]
        assert sum(len(step.outputs) for step in steps) == 2 * 8
        assert len(steps) <= 9
    await worker.stop()
