"""Quantized KV in blocks of a real pool: what is read back, and that a block's bytes say only which tokens it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dense_reference import dense_attention
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.kernels import quantized
from engine.kernels.reference import paged_attention, store_kv
from engine.kernels.scoring import Scoring
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout

NUM_LAYERS, LAYER, KV_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 1, 2, 8, 4
QUANTIZED = ("fp8_e4m3", "int8")
each_format = pytest.mark.parametrize("dtype", QUANTIZED)
any_format = st.sampled_from(QUANTIZED)


def pool_of(dtype: str, num_blocks: int = 3) -> KvCache:
    layout = KvLayout(
        num_layers=NUM_LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype=dtype
    )
    return KvCache(layout, num_blocks)


@dataclass(frozen=True)
class Tokens:
    """Keys and values of one sequence."""

    k: torch.Tensor  # [n, kv_heads, head_dim]
    v: torch.Tensor

    def write(self, kv: KvCache, table: Sequence[int], chunk_sizes: Sequence[int] = (), first: int = 0) -> None:
        """In chunks of the given sizes and one with the rest, from token `first` on."""
        for positions in torch.split(torch.arange(first, len(self.k)), _sizes(chunk_sizes, len(self.k) - first)):
            blocks, offsets = torch.tensor(table)[positions // BLOCK_SIZE], positions % BLOCK_SIZE
            store_kv(self.k[positions], self.v[positions], kv.pool, LAYER, blocks, offsets, kv.scales)

    @property
    def both(self) -> torch.Tensor:  # [2, n, kv_heads, head_dim]
        return torch.stack((self.k, self.v))


def _sizes(chunk_sizes: Sequence[int], total: int) -> list[int]:
    """As many of the chunks as there are tokens for, the last one cut or a new one added so that they add up."""
    sizes: list[int] = []
    for size in [*chunk_sizes, total]:
        sizes.append(min(size, total - sum(sizes)))
    return [size for size in sizes if size]


def read(kv: KvCache, table: Sequence[int], num_tokens: int) -> torch.Tensor:
    """[2, n, kv_heads, head_dim] float64, worked out from the bytes without the code under test."""
    assert kv.scales is not None
    values = kv.pool.double() + (0.5 if kv.layout.dtype == "int8" else 0.0)
    values = (values * kv.scales[..., None, None].double())[list(table), LAYER]  # [n, 2, kv_heads, block_size, dim]
    return values.permute(1, 0, 3, 2, 4).reshape(2, -1, KV_HEADS, HEAD_DIM)[:, :num_tokens]


def contents(kv: KvCache) -> list[bytes]:
    return [bytes(kv.block(block)) for block in range(kv.num_blocks)]


def random_tokens(count: int, spread: float = 2.0, seed: int = 0) -> Tokens:
    """Of sizes so different that most tokens change the scale."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.normal(0, spread, (2, count, KV_HEADS, 1)))
    k, v = torch.from_numpy((rng.normal(size=(2, count, KV_HEADS, HEAD_DIM)) * sizes).astype(np.float32))
    return Tokens(k, v)


@st.composite
def tokens(draw: st.DrawFn, max_tokens: int = 2 * BLOCK_SIZE) -> Tokens:
    """Up to `max_tokens` tokens of any sizes, with values down to where the formats lose them, and zeros."""
    exponents = draw(st.lists(st.integers(-30, 30), min_size=1, max_size=max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (2, len(exponents), KV_HEADS, HEAD_DIM)
    # Few bits, so that values in the middle between two codes come often; or as many as there are.
    mantissas = rng.integers(32, 64, shape) / 32 if draw(st.booleans()) else rng.uniform(1, 2, shape)
    smaller = np.array(exponents)[:, None, None] - rng.integers(0, 16, shape)
    k, v = torch.from_numpy(
        (mantissas * rng.choice([-1, 0, 1], shape, p=[0.45, 0.1, 0.45]) * np.exp2(smaller)).astype(np.float32)
    )
    return Tokens(k, v)


chunkings = st.lists(st.integers(1, BLOCK_SIZE + 2), max_size=2 * BLOCK_SIZE)


@settings(deadline=None)
@given(any_format, tokens(), chunkings, chunkings)
def test_a_blocks_bytes_do_not_depend_on_the_chunks(
    dtype: str, written: Tokens, one: list[int], two: list[int]
) -> None:
    first, second = pool_of(dtype), pool_of(dtype)

    written.write(first, [2, 0], one)
    written.write(second, [2, 0], two)

    assert contents(first) == contents(second)


@each_format
@pytest.mark.parametrize("growth", [1, 2, 5, 9])
def test_no_value_depends_on_whether_the_scale_grew_before_or_after_it_was_written(dtype: str, growth: int) -> None:
    # Beside 1.0, which sets the scale: three of all values with 9 bits, down to where both formats lose them.
    values = (torch.arange(256, 512) / 512 * 2.0 ** torch.arange(0, -18, -1)[:, None]).view(-1, 1) * torch.tensor(
        [1, -1]
    )
    first = torch.cat((torch.ones(3072, 1), values.view(3072, 3)), dim=1).view(2, -1, KV_HEADS, HEAD_DIM)
    second = torch.full_like(first, 2.0**growth)
    num_blocks = first.shape[1]
    later, together = pool_of(dtype, num_blocks), pool_of(dtype, num_blocks)

    def put(kv: KvCache, both: torch.Tensor, offsets: list[int]) -> None:  # both: [2, blocks * offsets, heads, dim]
        blocks = torch.arange(num_blocks).repeat_interleave(len(offsets))
        store_kv(both[0], both[1], kv.pool, LAYER, blocks, torch.tensor(offsets * num_blocks), kv.scales)

    put(later, first, [0])
    put(later, second, [1])
    put(together, torch.stack((first, second), dim=2).flatten(1, 2), [0, 1])

    assert contents(later) == contents(together)


@settings(deadline=None)
@given(any_format, tokens(), chunkings)
def test_what_is_read_is_near_what_was_written(dtype: str, written: Tokens, chunk_sizes: list[int]) -> None:
    kv = pool_of(dtype)
    written.write(kv, [2, 0], chunk_sizes)

    errors = (read(kv, [2, 0], len(written.k)) - written.both).abs()

    for start in range(0, len(written.k), BLOCK_SIZE):
        of_block = written.both[:, start : start + BLOCK_SIZE].double()
        largest = of_block.abs().amax(dim=(1, 3), keepdim=True).clamp(min=2.0**-100)
        bound = largest / 128 if dtype == "int8" else torch.maximum(of_block.abs() / 16, largest / 8192)
        assert (errors[:, start : start + BLOCK_SIZE] <= bound).all()


@each_format
def test_bounds_hold_for_many_random_tokens(dtype: str) -> None:
    written = random_tokens(10 * BLOCK_SIZE)
    kv = pool_of(dtype, num_blocks=10)
    written.write(kv, range(10))

    errors = (read(kv, range(10), len(written.k)) - written.both).abs()

    by_block = written.both.double().view(2, 10, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    largest = by_block.abs().amax(dim=(2, 4), keepdim=True)
    bound = largest / 128 if dtype == "int8" else torch.maximum(by_block.abs() / 16, largest / 8192)
    relative = errors.view_as(by_block) / bound
    assert 0.9 < relative.max() <= 1  # and they are no wider than they must be


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("bfloat16", 8), ("float16", 11)])
def test_types_without_scales_round_to_nearest(dtype: str, bits: int) -> None:
    kv, written = pool_of(dtype), random_tokens(2 * BLOCK_SIZE)
    written.write(kv, [2, 0], [3, 7])

    stored = kv.pool[[2, 0], LAYER].permute(1, 0, 3, 2, 4).reshape(written.both.shape).double()

    assert kv.scales is None
    assert ((stored - written.both).abs() <= written.both.abs() * 2.0**-bits).all()


@settings(deadline=None)
@given(any_format, tokens(max_tokens=BLOCK_SIZE), chunkings, st.data())
def test_a_reused_block_keeps_nothing_of_its_former_owner(
    dtype: str, written: Tokens, chunk_sizes: list[int], data: st.DataObject
) -> None:
    fresh, reused = pool_of(dtype), pool_of(dtype)
    left = data.draw(st.binary(min_size=1, max_size=64))
    reused.block(1)[:] = (left * reused.layout.block_bytes)[: reused.layout.block_bytes]
    padding = bytes(reused.block(1)[reused.layout.scales_offset + reused.layout.scales_bytes :])

    written.write(fresh, [1], chunk_sizes)
    written.write(reused, [1], chunk_sizes)

    assert torch.equal(reused.pool.view(torch.int8)[1, LAYER], fresh.pool.view(torch.int8)[1, LAYER])
    assert fresh.scales is not None
    assert reused.scales is not None
    assert torch.equal(reused.scales[1, LAYER], fresh.scales[1, LAYER])
    assert bytes(reused.block(1)).endswith(padding)


@each_format
@pytest.mark.parametrize("left", [1e30, float("nan"), 0.0])
def test_a_former_owners_scale_does_not_coarsen_a_new_block(dtype: str, left: float) -> None:
    kv = pool_of(dtype)
    assert kv.scales is not None
    kv.scales.fill_(left)
    written = random_tokens(3)

    written.write(kv, [1], [1])

    assert torch.allclose(
        read(kv, [1], 3), written.both.double(), rtol=1 / 16, atol=float(written.both.abs().max()) / 128
    )


@each_format
def test_a_sequence_that_goes_on_in_a_moved_block_writes_the_same_bytes(dtype: str) -> None:
    source, target, written = pool_of(dtype), pool_of(dtype), random_tokens(BLOCK_SIZE)
    written.write(source, [2])
    prefix = Tokens(written.k[:5], written.v[:5])
    prefix.write(target, [0])

    target.block(1)[:] = target.block(0)
    written.write(target, [1], [1, 1], first=5)

    assert bytes(target.block(1)) == bytes(source.block(2))


@each_format
def test_writing_the_last_slot_again_changes_nothing(dtype: str) -> None:
    kv, written = pool_of(dtype), random_tokens(5)
    written.write(kv, [1])
    before = contents(kv)

    written.write(kv, [1], first=4)

    assert contents(kv) == before


@each_format
def test_only_the_blocks_and_the_layer_that_are_named_are_written(dtype: str) -> None:
    kv = pool_of(dtype)
    for block in range(3):
        kv.block(block)[:] = b"\x31" * kv.layout.block_bytes
    before = kv.pool.view(torch.int8).clone()
    assert kv.scales is not None
    scales_before = kv.scales.clone()

    random_tokens(3).write(kv, [1])

    changed = (kv.pool.view(torch.int8) != before).flatten(2).any(dim=2) | (kv.scales != scales_before).flatten(2).any(
        2
    )
    assert changed.nonzero().tolist() == [[1, LAYER]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@each_format
def test_a_value_that_is_not_finite_shows_in_its_head_until_the_block_begins_anew(dtype: str, value: float) -> None:
    kv, written = pool_of(dtype), random_tokens(2 * BLOCK_SIZE)
    written.v[3, 1, 2] = value
    written.write(kv, [2, 0], [2, 4])
    bad = read(kv, [2, 0], 2 * BLOCK_SIZE).isnan()

    assert bad[1, :BLOCK_SIZE, 1].all()
    assert int(bad.sum()) == BLOCK_SIZE * HEAD_DIM

    random_tokens(4).write(kv, [2])
    assert read(kv, [2], 4).isfinite().all()


def test_every_fp8_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256).to(torch.uint8).view(1, 1, 1, 256, 1).view(quantized.FP8)
    out = torch.empty(1, 1, 1, 256, 1)

    quantized.load(codes, torch.ones(1, 1, 1), torch.tensor([0]), out)

    expected = codes.float().view_as(out)
    finite = ~expected.isnan()  # the two codes of NaN are never stored
    assert int(finite.sum()) == 254
    assert torch.equal(out[finite], expected[finite])


def test_int8_is_rounded_down_and_read_in_the_middle() -> None:
    kv = pool_of("int8")
    zeros = torch.zeros(2, KV_HEADS, HEAD_DIM)
    k = zeros.clone()
    k[0, 0] = torch.tensor([-3.0, 0.9, 0.1, -0.1])
    k[1, 0, 0] = 70.0

    Tokens(k[:1], zeros[:1]).write(kv, [1])
    assert kv.scales is not None
    assert kv.scales[1, LAYER, 0, 0] == 2 / 64
    assert read(kv, [1], 1)[0, 0, 0].tolist() == [
        -96 / 32 + 1 / 64,
        28 / 32 + 1 / 64,
        3 / 32 + 1 / 64,
        -4 / 32 + 1 / 64,
    ]

    Tokens(k, zeros).write(kv, [1], first=1)
    assert kv.scales[1, LAYER, 0, 0] == 64 / 64
    assert read(kv, [1], 2)[0, :, 0].tolist() == [[-2.5, 0.5, 0.5, -0.5], [70.5, 0.5, 0.5, 0.5]]


def test_fp8_survives_a_larger_scale_but_for_what_gets_tiny() -> None:
    kv = pool_of("fp8_e4m3")
    zeros = torch.zeros(2, KV_HEADS, HEAD_DIM)
    k = zeros.clone()
    k[0, 0] = torch.tensor([1.0, -0.8125, 2.0**-9, 2.0**-10])
    k[1, 0, 0] = 2.0**4

    Tokens(k[:1], zeros[:1]).write(kv, [1])
    assert read(kv, [1], 1)[0, 0, 0].tolist() == k[0, 0].tolist()

    Tokens(k, zeros).write(kv, [1], first=1)
    assert read(kv, [1], 2)[0, :, 0].tolist() == [[1.0, -0.8125, 2.0**-9, 0.0], [16.0, 0.0, 0.0, 0.0]]


@each_format
@pytest.mark.parametrize("length", [1, 8, 50, 260])
def test_attention_equals_the_dense_one_over_what_the_codes_say(dtype: str, length: int) -> None:
    num_blocks = -(-length // BLOCK_SIZE)
    kv, written = pool_of(dtype, num_blocks + 2), random_tokens(length, spread=0.5)
    assert kv.scales is not None
    kv.scales.fill_(torch.nan)
    table = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(2))[:num_blocks]
    written.write(kv, table.tolist(), [7, 20])
    q = torch.randn(min(length, 9), 6, HEAD_DIM, generator=torch.Generator().manual_seed(3))

    result = paged_attention(q, kv.pool, LAYER, [table], [0, len(q)], [length], Scoring(0.5), kv.scales)

    k, v = read(kv, table.tolist(), length).numpy()
    np.testing.assert_allclose(result.numpy(), dense_attention(q.double().numpy(), k, v, 0.5), rtol=0, atol=1e-5)


@settings(deadline=None)
@given(any_format, tokens(max_tokens=BLOCK_SIZE), st.integers(-40, 40))
def test_a_power_of_two_in_all_values_is_one_in_the_scales(dtype: str, written: Tokens, exponent: int) -> None:
    assume(all(2.0**-50 < size < 2.0**50 for size in written.both.abs().amax(dim=(1, 3)).flatten().tolist()))
    kv, larger = pool_of(dtype), pool_of(dtype)
    factor = 2.0**exponent

    written.write(kv, [1])
    Tokens(written.k * factor, written.v * factor).write(larger, [1])

    assert torch.equal(read(larger, [1], len(written.k)), read(kv, [1], len(written.k)) * factor)
