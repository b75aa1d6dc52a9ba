"""Many requests of every kind in a pool that is far too small, with everything that can go wrong at random moments."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from block_follower import BlockFollower
from factories import EngineHarness, HarnessFactory, kv_of, make_request
from fakes import expected_output

from engine.errors import PinLimit, RequestError
from engine.interruption import PassStopped
from engine.request import Request, RequestKind, RequestStatus

NUM_BLOCKS = 14
NUM_REQUESTS = 60
MAX_LIVE_TO_FORK = 30
PREFIXES = [[7] * 9, list(range(100, 117)), [7] * 5 + [8] * 4, []]


class Chaos:
    """The outside world of one engine: clients, links and their failures, all drawn from one seed."""

    def __init__(self, harness: EngineHarness, seed: int) -> None:
        self.harness = harness
        self.engine = harness.engine
        self.dice = random.Random(seed)
        self.writing: dict[str, list[int]] = {}
        """Slots of cancelled reservations that a link still writes into."""
        self.reading: dict[str, list[tuple[int, bytes]]] = {}
        """Blocks of prefill requests that a link still reads, and what it must find."""
        self.cancelled: set[str] = set()
        self.follower = BlockFollower()

    def run(self) -> None:
        to_come = NUM_REQUESTS
        while to_come or self.engine.has_work() or self.unsettled():
            if to_come and self.dice.random() < 0.5:
                to_come -= 1
                self.arrive()
            self.one_thing_happens()
            self.operators_do_something()
            if self.dice.random() < 0.05:
                self.harness.model.fault = PassStopped()
            self.harness.step()
            self.links_touch_memory()

    def unsettled(self) -> bool:
        return bool(self.writing or self.reading or self.live())

    def live(self) -> list[Request]:
        return [r for r in self.harness.requests.values() if r.status is not RequestStatus.FINISHED]

    def arrive(self) -> None:
        suffix = self.dice.choices(range(500), k=self.dice.randint(1, 8))
        prompt = self.dice.choice(PREFIXES) + suffix
        output = expected_output(prompt, self.dice.choice([0, 0, 0, 2, 5]))
        kind = self.dice.choice([RequestKind.LOCAL, RequestKind.LOCAL, RequestKind.DECODE, RequestKind.PREFILL])
        max_tokens, priority = len(output) + self.dice.randint(2, 20), self.dice.randint(-1, 1)
        request = make_request(prompt, output=output, kind=kind, max_tokens=max_tokens, priority=priority)
        accept = self.harness.reserve if kind is RequestKind.DECODE else self.harness.submit
        try:
            accept(request)
        except RequestError:  # it fits, but not beside what is pinned
            self.engine.unpin("x")
            self.engine.unpin("y")
            accept(request)

    def one_thing_happens(self) -> None:
        if self.writing and self.dice.random() < 0.3:
            self.engine.quiet(self.writing.pop(self.dice.choice(list(self.writing))))
        if self.reading and self.dice.random() < 0.3:
            self.engine.quiet([block for block, _ in self.reading.pop(self.dice.choice(list(self.reading)))])
        live = self.live()
        if not live:
            return
        request = self.dice.choice(live)
        if self.dice.random() < 0.04:
            self.cancel(request)
        elif len(live) < MAX_LIVE_TO_FORK and self.dice.random() < 0.08:
            self.fork(request)
        elif request.kind is RequestKind.DECODE:
            self.hand_over(request)
        elif request.status is RequestStatus.HELD:
            self.check_source(self.source_of(request))
            self.engine.release_held(request.request_id)

    def fork(self, request: Request) -> None:
        """Two that draw along, and one that goes another way from somewhere before."""
        prompt, tokens = request.token_ids[: request.num_prompt_tokens], request.token_ids
        output = tokens[len(prompt) :]
        max_tokens = len(output) + self.dice.randint(2, 10)
        along = [make_request(prompt, output=output, max_tokens=max_tokens) for _ in range(2)]
        branch = make_request([*tokens[: self.dice.randint(1, len(tokens))], 333], max_tokens=self.dice.randint(1, 8))
        with suppress(RequestError):  # beside what is pinned they may not fit: then none was accepted
            self.harness.fork(request, [*along, branch])

    def operators_do_something(self) -> None:
        what = self.dice.random()
        if what < 0.05:
            with suppress(PinLimit):
                self.engine.pin(self.dice.choice("xy"), b"tenant", self.dice.choice(PREFIXES))
        elif what < 0.1:
            self.engine.unpin(self.dice.choice("xy"))
        elif what < 0.15:
            self.engine.reset_prefix_cache()
        elif what < 0.4:
            self.follow()

    def follow(self) -> None:
        self.follower.apply(self.engine.take_block_events())
        if self.follower.needs_snapshot:
            self.follower.restart(self.engine.block_snapshot())
        assert set(self.follower.resident) == set(self.engine.block_snapshot().hashes)

    def hand_over(self, request: Request) -> None:
        adoption = request.adoption
        if adoption is None:
            return
        what = self.dice.random()
        if what < 0.1:
            self.engine.give_up_transfer(request.request_id)
            self.start(request, [])
        elif what < (0.2 if adoption.missing else 0.7):
            self.start(request, self.next_token(request))
        elif adoption.missing and not adoption.given_up:
            self.harness.bring(request, self.dice.sample(sorted(adoption.missing), 1))

    def start(self, request: Request, token_ids: list[int]) -> None:
        if request.adoption is not None and not request.adoption.started:
            self.harness.start(request, token_ids)

    def next_token(self, request: Request) -> list[int]:
        """What the prefill worker drew."""
        prompt, index = request.token_ids[: request.num_prompt_tokens], request.num_output_tokens
        return expected_output(prompt, index + 1)[index:]

    def cancel(self, request: Request) -> None:
        busy: list[int] = []
        if request.status is RequestStatus.AWAITING_KV and request.adoption and not request.adoption.given_up:
            slots = [request.block_table[i] for i in sorted(request.adoption.missing)]
            busy = [slot for slot in slots if self.dice.random() < 0.5]
            if busy:
                self.writing[request.request_id] = busy
        elif request.kind is RequestKind.PREFILL:
            source = [pair for pair in self.source_of(request) if self.dice.random() < 0.5]
            busy = [block for block, _ in source]
            if busy:
                self.reading[request.request_id] = source
        self.cancelled.add(request.request_id)
        self.engine.cancel(request.request_id, busy)

    def source_of(self, request: Request) -> list[tuple[int, bytes]]:
        """Complete blocks of a prefill request, and what a link must read in them."""
        num_complete = request.num_computed_tokens // self.harness.kv.layout.block_size
        contents = kv_of(request.token_ids)
        return list(zip(request.block_table[:num_complete], contents, strict=False))

    def check_source(self, source: list[tuple[int, bytes]]) -> None:
        for block, content in source:
            assert bytes(self.harness.kv.block(block)) == content, f"block {block} changed while a link read it"

    def links_touch_memory(self) -> None:
        for slots in self.writing.values():
            for slot in slots:
                self.harness.kv.block(slot)[:] = self.dice.randbytes(self.harness.kv.layout.block_bytes)
        for source in self.reading.values():
            self.check_source(source)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("num_host_blocks", "preemption"), [(0, "recompute"), (9, "recompute"), (9, "swap")])
@pytest.mark.parametrize("seed", range(4))
def test_no_history_loses_a_block_or_changes_a_token(
    make_engine: HarnessFactory, seed: int, caching: bool, num_host_blocks: int, preemption: str
) -> None:
    harness = make_engine(
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        max_waiting=200,
        enable_prefix_caching=caching,
        num_host_blocks=num_host_blocks,
        preemption=preemption,
    )
    chaos = Chaos(harness, seed)
    chaos.run()

    for request in harness.requests.values():
        assert harness.outputs[request.request_id] == harness.expected(request)
        ended = request.request_id in harness.ends or request.kind is RequestKind.PREFILL
        assert ended or request.request_id in chaos.cancelled
    chaos.follow()
    stats = harness.engine.stats()
    assert stats.blocks.free + stats.blocks.cached == NUM_BLOCKS
    assert stats.preemptions > 0
    assert stats.blocks.copies > 0
    assert stats.host.held == 0
    assert (stats.swaps > 0) == (preemption == "swap")
    assert (stats.host.restored > 0) == (num_host_blocks > 0 and (caching or preemption == "swap"))
    assert not harness.engine.has_work()
