"""What an operator and a router do with an engine's cached KV: pin it, forget it, follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from block_follower import BlockFollower
from factories import HarnessFactory, fake_identity, fake_layout, make_request
from fakes import NUM_LAYERS, FakeModel, expected_output

from engine.batch import ForwardBatch
from engine.block_events import Stored
from engine.block_hash import block_chain, pack_tokens
from engine.config import CacheConfig, LocalLayers, SchedulerConfig
from engine.engine import Engine
from engine.errors import DigestMismatch, InternalError, PinLimit, RequestError
from engine.kv_cache import KvCache
from engine.request import RequestStatus

SYSTEM = list(range(100, 110))  # 2 full blocks of 4 tokens, and 2 tokens
OTHER = list(range(200, 210))
SCOPE = b"tenant"


def test_a_pinned_prefix_survives_what_would_evict_it(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=12)
    harness.submit(make_request(SYSTEM))
    harness.run()
    assert harness.engine.pin("system", SCOPE, SYSTEM) == 8
    harness.submit(make_request(range(30), max_tokens=10))
    harness.run()
    again = harness.submit(make_request([*SYSTEM, 1]))
    harness.run()
    assert again.num_cached_tokens == 8

    harness.engine.unpin("system")
    harness.submit(make_request(range(200, 239), max_tokens=10))
    harness.run()
    once_more = harness.submit(make_request([*SYSTEM, 1]))
    harness.run()
    assert once_more.num_cached_tokens == 0


def test_a_pin_says_how_much_is_resident(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    assert harness.engine.pin("system", SCOPE, SYSTEM) == 0
    harness.submit(make_request(SYSTEM[:5]))
    harness.run()
    assert harness.engine.pin("system", SCOPE, SYSTEM) == 4
    assert harness.engine.pin("system", b"other", SYSTEM) == 0
    with pytest.raises(RequestError, match="prompt_token_ids"):
        harness.engine.pin("system", SCOPE, [-1])


def test_a_request_that_does_not_fit_beside_what_is_pinned_is_refused_at_once(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=12)
    harness.submit(make_request(SYSTEM))
    harness.run()
    harness.engine.pin("system", SCOPE, SYSTEM)
    with pytest.raises(RequestError, match="the pool has 12, of which 2 are pinned"):
        harness.submit(make_request(range(40), max_tokens=2))
    harness.engine.unpin("system")
    request = harness.submit(make_request(range(40), max_tokens=2))
    harness.run()
    assert harness.outputs[request.request_id] == expected_output(range(40), 2)


def test_a_request_fits_beside_the_pinned_blocks_that_it_begins_with(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=12)
    for prompt in (SYSTEM, OTHER):
        harness.submit(make_request(prompt, max_tokens=1))
        harness.run()
    harness.engine.pin("system", SCOPE, SYSTEM)
    whole_pool = harness.submit(make_request([*SYSTEM, *range(28)], max_tokens=11))
    assert harness.engine.pin("system", SCOPE, SYSTEM) == 8
    with pytest.raises(PinLimit, match="at most 0"):
        harness.engine.pin("more", SCOPE, OTHER)
    harness.run()
    assert harness.outputs[whole_pool.request_id] == expected_output([*SYSTEM, *range(28)], 11)
    with pytest.raises(RequestError, match="the pool has 12, of which 1 are pinned"):
        harness.submit(make_request(SYSTEM[:8], max_tokens=41))  # writes its last block before it can share that


def test_nothing_is_pinned_that_an_accepted_request_needs(make_engine: HarnessFactory) -> None:
    harness = make_engine(num_blocks=12)
    harness.submit(make_request(SYSTEM))
    harness.run()
    large = harness.submit(make_request(range(40), max_tokens=8))
    with pytest.raises(PinLimit, match="at most 0"):
        harness.engine.pin("system", SCOPE, SYSTEM)
    harness.run()
    assert harness.outputs[large.request_id] == expected_output(range(40), 8)


def test_the_cache_is_forgotten_only_when_nothing_is_in_use(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(SYSTEM))
    harness.step()
    assert not harness.engine.reset_prefix_cache()
    harness.run()
    assert request.status is RequestStatus.FINISHED
    assert harness.engine.reset_prefix_cache()
    assert harness.engine.stats().blocks.free == 64
    again = harness.submit(make_request(SYSTEM))
    harness.run()
    assert again.num_cached_tokens == 0


def test_the_events_name_the_blocks_of_prompt_and_output(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(SYSTEM, max_tokens=8))
    harness.run()
    batch = harness.engine.take_block_events()
    (stored,) = batch.events
    assert isinstance(stored, Stored)
    chain = block_chain(fake_identity().root(SCOPE), pack_tokens(request.token_ids[:16]), 4)
    assert stored.hashes == tuple(chain)
    follower = BlockFollower()
    follower.apply(batch)
    assert set(follower.resident) == set(harness.engine.block_snapshot().hashes)


def test_events_carry_the_incarnation_of_the_worker() -> None:
    kv = KvCache(fake_layout(), 8)
    engine = Engine(
        FakeModel(),
        kv,
        CacheConfig(num_blocks=8, block_size=4),
        SchedulerConfig(),
        fake_identity(),
        64,
        incarnation="i7",
    )
    assert engine.take_block_events().incarnation == engine.block_snapshot().incarnation == "i7"
    engine.check_integrity()
    kv.close()


@pytest.mark.parametrize(("window", "of_model"), [(4, None), (4, 5)])
def test_a_window_narrower_than_the_models_is_refused(window: int, of_model: int | None) -> None:
    kv, model = KvCache(fake_layout(), 8), FakeModel()
    if of_model is not None:
        model.config = replace(model.config, local=LocalLayers(window=of_model, layers=tuple(range(NUM_LAYERS))))
    config = CacheConfig(num_blocks=8, block_size=4, sliding_window=window)
    with pytest.raises(InternalError, match="sliding_window 4 gives back blocks that the model"):
        Engine(model, kv, config, SchedulerConfig(), fake_identity(), 64)
    kv.close()


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_who_computes_from_a_damaged_block_fails_and_the_next_computes_it_again(
    make_engine: HarnessFactory, num_host_blocks: int
) -> None:
    harness = make_engine(num_host_blocks=num_host_blocks)
    failing, other = harness.submit(make_request(SYSTEM)), harness.submit(make_request(OTHER))
    harness.step()
    block = failing.block_table[1]
    harness.kv.block(block)[0] ^= 1

    output = harness.engine.discard(block, harness.engine.generation(block))

    assert [(update.request_id, type(update.error)) for update in output.updates] == [
        (failing.request_id, DigestMismatch)
    ]
    assert harness.engine.stats().blocks.damaged == 1
    again = harness.submit(make_request(SYSTEM))
    harness.run()
    assert again.num_cached_tokens == 4
    assert harness.outputs[again.request_id] == harness.expected(again)
    assert harness.outputs[other.request_id] == harness.expected(other)


def test_a_block_that_was_handed_out_again_since_is_not_discarded(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(make_request(SYSTEM))
    harness.step()
    block = request.block_table[0]

    assert not harness.engine.discard(block, harness.engine.generation(block) - 1).updates

    assert harness.engine.stats().blocks.damaged == 0
    harness.run()


class Poisonable(FakeModel):
    """Gives NaN for a sequence that reads a block of nothing but ones."""

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        logits = super().forward(batch, kv)
        for row, token in enumerate(batch.sample_rows):
            s = sum(start <= token for start in batch.query_starts) - 1
            full = batch.block_tables[s][: batch.context_lens[s] // kv.layout.block_size]
            if any(set(bytes(kv.block(block))) == {0xFF} for block in full):
                logits[row] = torch.nan
        return logits


def test_a_cached_prefix_that_gives_no_token_is_computed_anew_by_the_next_who_asks(make_engine: HarnessFactory) -> None:
    harness = make_engine(model=Poisonable(), max_num_batched_tokens=64)
    first, other = harness.submit(make_request(SYSTEM)), harness.submit(make_request(OTHER))
    harness.step()
    damaged = first.block_table[1]
    harness.run()
    harness.kv.block(damaged)[:] = b"\xff" * len(harness.kv.block(damaged))

    failing = harness.submit(make_request(SYSTEM))
    harness.run()
    again, unharmed = harness.submit(make_request(SYSTEM)), harness.submit(make_request(OTHER))
    harness.run()

    assert isinstance(harness.ends[failing.request_id].error, DigestMismatch)  # of the kind that routers try again
    assert (again.num_cached_tokens, unharmed.num_cached_tokens > 0) == (0, True)
    for request in (first, other, again, unharmed):
        assert harness.outputs[request.request_id] == harness.expected(request)
