"""Engines around a real decoder, with each type of KV: what shares, moves or copies blocks does it scales and all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from factories import FINGERPRINT, make_request
from tiny_llama import TINY, fill_with_nan, model_of, random_tensors

from engine.block_hash import BlockIdentity
from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine, Reservation
from engine.kv_cache import KvCache
from engine.kv_layout import KV_DTYPE_BYTES, KvLayout
from engine.parallel_sampling import further_samples
from engine.request import Request, RequestKind
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
PROMPT = [random.Random(4).randrange(3, TINY.vocab_size) for _ in range(26)]  # 6 full blocks and a half
RANDOM = SamplingParams(temperature=1.5, seed=11, max_tokens=9)

pytestmark = pytest.mark.parametrize("dtype", KV_DTYPE_BYTES)


class KvEngine:
    """An engine whose pool is full of NaN at first. `outputs` has every token drawn, by request."""

    def __init__(self, dtype: str) -> None:
        layout = KvLayout(
            num_layers=TINY.num_layers,
            num_kv_heads=TINY.num_kv_heads,
            head_dim=TINY.head_dim,
            block_size=BLOCK_SIZE,
            dtype=dtype,
        )
        self.kv = KvCache(layout, 48)
        fill_with_nan(self.kv)
        self.engine = Engine(
            model_of(TINY, random_tensors(TINY)),
            self.kv,
            CacheConfig(num_blocks=self.kv.num_blocks, block_size=BLOCK_SIZE),
            SchedulerConfig(max_num_batched_tokens=11, max_num_seqs=4),
            BlockIdentity(model_fingerprint=FINGERPRINT, kv_dtype=dtype, block_size=BLOCK_SIZE),
            TINY.max_model_len,
        )
        self.outputs: dict[str, list[int]] = {}

    def step(self) -> None:
        for update in self.engine.step().updates:
            assert update.error is None
            if update.token is not None:
                self.outputs.setdefault(update.request_id, []).append(update.token.token_id)

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)
        while self.engine.has_work():
            self.step()

    def until_first_token(self, request: Request) -> None:
        while not request.num_output_tokens:
            self.step()

    def contents(self, blocks: Sequence[int]) -> list[bytes]:
        return [bytes(self.kv.block(block)) for block in blocks]


@pytest.fixture
def engines(dtype: str) -> Iterator[list[KvEngine]]:
    engines = [KvEngine(dtype) for _ in range(2)]
    yield engines
    for engine in engines:
        engine.engine.check_integrity()
        engine.kv.close()


def test_decode_goes_on_from_moved_blocks_as_if_it_had_computed_them(engines: list[KvEngine], dtype: str) -> None:
    alone = KvEngine(dtype)
    whole = make_request(PROMPT, params=RANDOM)
    alone.run(whole)
    prefill, decode = engines
    first, second = (
        make_request(PROMPT, params=RANDOM, kind=kind) for kind in (RequestKind.PREFILL, RequestKind.DECODE)
    )
    grants: list[Reservation] = []

    prefill.run(first)
    decode.engine.reserve(second, grants.append)
    decode.step()
    for block in grants[0].missing:
        decode.kv.block(block.slot)[:] = prefill.kv.block(first.block_table[block.ordinal])
        decode.engine.adopted(second.request_id, block.ordinal)
    decode.engine.start(second.request_id, prefill.outputs[first.request_id])
    decode.run()

    output = prefill.outputs[first.request_id] + decode.outputs[second.request_id]
    assert output == alone.outputs[whole.request_id]
    assert len(set(output)) > 3
    prefill.engine.cancel(first.request_id)
    alone.kv.close()


def test_blocks_that_are_shared_are_never_written(engines: list[KvEngine]) -> None:
    engine = engines[0]
    first = make_request(PROMPT, params=RANDOM)
    engine.engine.submit(first)
    while first.num_computed_tokens < len(PROMPT):
        engine.step()
    shared = first.block_table[: len(PROMPT) // BLOCK_SIZE]
    before = engine.contents(shared)
    others = [make_request([*PROMPT[:24], *tail], params=RANDOM) for tail in ([], [5, 6, 7], [8] * 9)]

    engine.run(*others)

    assert [other.num_cached_tokens for other in others] == [20, 24, 24]
    assert engine.contents(shared) == before


def test_samples_that_part_from_a_shared_block_take_its_scales_along(engines: list[KvEngine]) -> None:
    together, alone = engines
    parent = make_request(PROMPT, params=RANDOM)
    samples = [parent, *further_samples(parent, 4)]

    together.engine.submit(parent)
    together.engine.fork(parent.request_id, samples[1:])
    together.run()

    for sample in samples:
        alone.engine.reset_prefix_cache()
        same = make_request(PROMPT, params=sample.params)
        alone.run(same)
        assert together.outputs[sample.request_id] == alone.outputs[same.request_id]
    assert len({tuple(output) for output in together.outputs.values()}) == 4


def test_a_branch_within_a_block_has_the_bytes_that_it_has_alone(engines: list[KvEngine]) -> None:
    """Also where the parent's later tokens in that block need a larger scale than the branch's."""
    together, alone = engines
    for token_id in range(3, 15):
        for engine in engines:
            engine.engine.reset_prefix_cache()
        parent = make_request([*PROMPT[:5], token_id, *PROMPT[6:]], params=RANDOM)
        together.engine.submit(parent)
        while parent.num_computed_tokens < len(PROMPT):
            together.step()
        tokens = [*PROMPT[:5], *PROMPT[20:23]]  # parts after a block and a token
        branch, same = (make_request(tokens, params=RANDOM) for _ in range(2))
        together.engine.fork(parent.request_id, [branch])
        assert branch.num_computed_tokens == (4 if together.kv.layout.quantized else 5)
        together.until_first_token(branch)
        alone.engine.submit(same)
        alone.until_first_token(same)

        assert together.contents(branch.block_table[:2]) == alone.contents(same.block_table[:2])

        together.run()
        alone.run()
        assert together.outputs[branch.request_id] == alone.outputs[same.request_id]
