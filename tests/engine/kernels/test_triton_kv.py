"""Triton's store and copies in its interpreter: the same bytes as the reference leaves in a poisoned pool."""

from __future__ import annotations

import pytest
import torch
from paged_cases import LAYER, NUM_LAYERS, poison

from engine.kernels import reference, triton_kv
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout

BLOCK_SIZE, KV_HEADS = 8, 3
QUANTIZED = ("fp8_e4m3", "int8")


def pools(dtype: str, head_dim: int = 12, block_size: int = BLOCK_SIZE, num_blocks: int = 5) -> tuple[KvCache, KvCache]:
    layout = KvLayout(
        num_layers=NUM_LAYERS, num_kv_heads=KV_HEADS, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    both = KvCache(layout, num_blocks), KvCache(layout, num_blocks)
    for kv in both:
        poison(kv)
    return both


def qkv_of(count: int, head_dim: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0) -> torch.Tensor:
    """As a projection gives them: queries before keys and values, and sizes so different that scales change."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(spread * torch.randn(count, 2 + 2 * KV_HEADS, 1, generator=generator))
    return (torch.randn(count, 2 + 2 * KV_HEADS, head_dim, generator=generator) * sizes).to(dtype)


def store_in_both(
    ours: KvCache, theirs: KvCache, qkv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor
) -> None:
    k, v = qkv[:, 2 : 2 + KV_HEADS], qkv[:, 2 + KV_HEADS :]
    triton_kv.store_kv(k, v, ours.pool, LAYER, blocks, offsets, ours.scales)
    kept = blocks >= 0
    reference.store_kv(k[kept], v[kept], theirs.pool, LAYER, blocks[kept], offsets[kept], theirs.scales)


def assert_same_bytes(ours: KvCache, theirs: KvCache) -> None:
    for block in range(ours.num_blocks):
        assert bytes(ours.block(block)) == bytes(theirs.block(block)), f"block {block}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tokens_go_into_their_slots_and_nowhere_else(dtype: str) -> None:
    ours, theirs = pools(dtype)
    blocks = torch.tensor([4, 4, 1, -1, 0])
    store_in_both(ours, theirs, qkv_of(5, 12, getattr(torch, dtype), 0.0), blocks, torch.tensor([6, 7, 0, 0, 3]))
    assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_blocks_hold_the_same_bytes_after_each_chunk(dtype: str) -> None:
    ours, theirs = pools(dtype)
    table, qkv = torch.tensor([3, 0, 4]), qkv_of(20, 12, torch.float32)
    for begin, end in ((0, 3), (3, 9), (9, 10), (10, 20)):
        positions = torch.arange(begin, end)
        store_in_both(ours, theirs, qkv[begin:end], table[positions // BLOCK_SIZE], positions % BLOCK_SIZE)
        assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_decode_step_of_several_sequences_some_of_which_are_none(dtype: str) -> None:
    ours, theirs = pools(dtype)
    first = torch.arange(4)
    for block in (1, 2):
        store_in_both(ours, theirs, qkv_of(4, 12, torch.float16, seed=block), torch.full((4,), block), first)
    store_in_both(
        ours, theirs, qkv_of(5, 12, torch.float16), torch.tensor([-1, 1, -1, 0, 2]), torch.tensor([0, 4, 0, 0, 4])
    )
    assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", *QUANTIZED])
def test_tokens_that_are_none_write_nothing_in_front_of_the_pool(dtype: str) -> None:
    kv, _ = pools(dtype)
    before = bytes(kv.block(0))
    k, v = torch.randn(2, 2, KV_HEADS, 12)
    slots = torch.tensor([1, -1]), torch.tensor([0, 3])
    triton_kv.store_kv(k, v, kv.pool[1:], LAYER, *slots, None if kv.scales is None else kv.scales[1:])
    assert bytes(kv.block(0)) == before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_value_that_is_not_finite_shows_as_in_the_reference(dtype: str, value: float) -> None:
    ours, theirs = pools(dtype)
    qkv = qkv_of(6, 12, torch.float32)
    qkv[2, 4, 1] = value
    for begin, end in ((0, 4), (4, 6)):
        positions = torch.arange(begin, end)
        store_in_both(ours, theirs, qkv[begin:end], torch.full((end - begin,), 2), positions)
    assert theirs.scales is not None
    assert int(theirs.scales[2, LAYER].isnan().sum()) == 1
    assert_same_bytes(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 16), (12, 8), (64, 32)])
def test_random_chunks_of_random_sizes(dtype: str, seed: int, head_dim: int, block_size: int) -> None:
    ours, theirs = pools(dtype, head_dim, block_size)
    generator = torch.Generator().manual_seed(seed)
    qkv = qkv_of(3 * block_size, head_dim, torch.float32, spread=8.0, seed=seed)
    begin = 0
    while begin < len(qkv):
        size = int(torch.randint(1, block_size + 3, (1,), generator=generator))
        positions = torch.arange(begin, min(begin + size, len(qkv)))
        table = torch.tensor([4, 1, 2])
        store_in_both(ours, theirs, qkv[positions], table[positions // block_size], positions % block_size)
        begin += size
    assert_same_bytes(ours, theirs)


def test_fp8_is_rounded_as_the_reference_rounds_it_everywhere() -> None:
    # Beside 1.0, which sets the scale: values with 9 bits, so that those half way between two codes come.
    values = (torch.arange(256, 512) / 512 * 2.0 ** torch.arange(0, -18, -1)[:, None]).view(-1)
    ours, theirs = pools("fp8_e4m3", head_dim=256, num_blocks=7)
    qkv = torch.ones(18, 2 + 2 * KV_HEADS, 256)
    qkv[:, 2] = values.view(18, 256)
    qkv[:, 3] = -values.view(18, 256)
    qkv[:, 2:, 0] = 1.0
    positions = torch.arange(18)
    store_in_both(ours, theirs, qkv, positions // BLOCK_SIZE, positions % BLOCK_SIZE)
    assert_same_bytes(ours, theirs)


def test_keys_and_values_of_two_tensors() -> None:
    ours, theirs = pools("float32")
    k, v = torch.randn(2, KV_HEADS, 12), torch.randn(2, KV_HEADS, 12)
    slots = torch.tensor([3, 1]), torch.tensor([0, 5])
    triton_kv.store_kv(k, v, ours.pool, LAYER, *slots)
    reference.store_kv(k, v, theirs.pool, LAYER, *slots)
    assert_same_bytes(ours, theirs)


def test_blocks_are_gathered_scattered_and_copied_whole() -> None:
    pool = torch.randint(0, 255, (9, 2 * 4096 * 4 + 64), dtype=torch.uint8)
    before, staging = pool.clone(), torch.full((3, pool.shape[1]), 0x7F, dtype=torch.uint8)
    ids, into = torch.tensor([7, -1, 2]), torch.tensor([0, 1, 2])

    triton_kv.copy_blocks(pool, staging, ids, into)
    triton_kv.copy_blocks(staging, pool, torch.tensor([2, 0]), torch.tensor([8, 3]))
    triton_kv.copy_blocks(pool, pool, torch.tensor([0]), torch.tensor([1]))

    assert torch.equal(staging[[0, 2]], before[[7, 2]])
    assert (staging[1] == 0x7F).all()
    assert torch.equal(pool[[8, 3, 1]], before[[2, 7, 0]])
    assert torch.equal(pool[[0, 2, 4, 5, 6, 7]], before[[0, 2, 4, 5, 6, 7]])


def test_a_slice_of_the_heads_is_gathered_as_the_layout_has_it() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=4, head_dim=16, block_size=8, dtype="float16")
    kv, shard = KvCache(layout, 4), layout.shard(1, 2)
    kv.pool.copy_(torch.randn(kv.pool.shape))
    staging = torch.zeros(2, shard.block_bytes, dtype=torch.uint8)
    source = kv.pool.view(torch.uint8).view(4, layout.block_bytes)
    head_bytes = layout.block_size * layout.head_dim * 2

    triton_kv.copy_parts(
        source,
        staging,
        torch.tensor([3, 1]),
        torch.tensor([0, 1]),
        (2 * head_bytes, 4 * head_bytes, 2 * head_bytes, 2 * layout.num_layers),
        (0, 2 * head_bytes),
    )

    expected = kv.pool[[3, 1], :, :, 2:]
    assert torch.equal(staging.view(torch.float16).view(expected.shape), expected)
