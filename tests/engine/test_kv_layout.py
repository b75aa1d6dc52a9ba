from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import ConfigError
from engine.kv_layout import KV_DTYPE_BYTES, KvLayout

SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")


def test_a_token_takes_keys_and_values_of_every_layer() -> None:
    assert SMOLLM2.token_bytes == 2 * 30 * 3 * 64 * 2
    assert SMOLLM2.block_bytes == 16 * SMOLLM2.token_bytes
    assert replace(SMOLLM2, dtype="float32").block_bytes == 2 * SMOLLM2.block_bytes


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_a_quantized_block_has_a_byte_a_value_and_ends_with_its_scales(dtype: str) -> None:
    layout = replace(SMOLLM2, dtype=dtype)

    assert layout.quantized
    assert layout.values_bytes == layout.scales_offset == SMOLLM2.block_bytes // 2
    assert layout.scales_shape == (30, 2, 3)
    assert layout.scales_bytes == 30 * 2 * 3 * 4
    assert layout.block_bytes == layout.values_bytes + 720 + 48  # up to a multiple of 64
    assert layout.token_bytes == 11_568


def test_values_scales_and_blocks_of_a_quantized_pool_begin_at_multiples_of_64_bytes() -> None:
    small = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=1, dtype="int8")

    assert (small.values_bytes, small.scales_offset, small.block_bytes) == (4, 64, 128)
    assert replace(small, block_size=256).token_bytes == 5  # 1024 + 64 bytes for 256 tokens, rounded up


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_block_without_scales_is_its_values(dtype: str) -> None:
    layout = replace(SMOLLM2, num_layers=1, num_kv_heads=1, head_dim=2, dtype=dtype)

    assert not layout.quantized
    assert layout.scales_bytes == 0
    assert layout.block_bytes == layout.values_bytes == 64 * KV_DTYPE_BYTES[dtype]


def test_the_shape_has_heads_outermost_inside_a_layers_part() -> None:
    assert SMOLLM2.shape == (30, 2, 3, 16, 64)


def test_a_layout_comes_back_from_the_wire() -> None:
    assert KvLayout.from_wire(SMOLLM2.to_wire()) == SMOLLM2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"num_kv_heads": -3}, "num_kv_heads must be at least 1, got -3"),
        ({"block_size": "16"}, "block_size must be int, got '16'"),
        ({"head_dim": True}, "head_dim must be int, got True"),
        ({"dtype": "int3"}, "KV dtype must be one of"),
        ({"dtype": None}, "dtype must be str, got None"),
        ({"pages": 1}, "KV layout has fields"),
    ],
)
def test_a_bad_field_from_the_wire_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvLayout.from_wire(SMOLLM2.to_wire() | change)


def test_a_missing_field_from_the_wire_is_refused() -> None:
    fields = SMOLLM2.to_wire()
    del fields["head_dim"]

    with pytest.raises(ConfigError, match="KV layout has fields"):
        KvLayout.from_wire(fields)


def test_shards_share_out_the_heads_of_a_whole() -> None:
    shards = [replace(SMOLLM2, num_kv_heads=6).shard(rank, 3) for rank in range(3)]

    assert [list(shard.heads) for shard in shards] == [[0, 1], [2, 3], [4, 5]]
    assert {shard.total_kv_heads for shard in shards} == {6}
    assert {shard.block_bytes for shard in shards} == {SMOLLM2.block_bytes * 2 // 3}


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 2), (3, 3), (-1, 3), (0, 0)])
def test_a_shard_that_is_none_is_refused(rank: int, num_ranks: int) -> None:
    with pytest.raises(ConfigError, match="3 KV heads have no equal shard"):
        SMOLLM2.shard(rank, num_ranks)


def test_a_shard_is_not_sharded_again() -> None:
    with pytest.raises(ConfigError, match="no equal shard"):
        replace(SMOLLM2, num_kv_heads=4).shard(0, 2).shard(0, 2)


def test_a_shard_comes_back_from_the_wire() -> None:
    shard = SMOLLM2.shard(1, 3)

    assert KvLayout.from_wire(shard.to_wire()) == shard


def test_a_whole_layout_looks_on_the_wire_as_it_did_before_there_were_shards() -> None:
    assert SMOLLM2.to_wire().keys() == {"num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads_before": 1}, "KV layout has fields"),
        ({"heads_before": -1, "heads_after": 0}, "heads_before must be at least 0, got -1"),
        ({"heads_before": 0, "heads_after": True}, "heads_after must be int, got True"),
    ],
)
def test_a_bad_shard_from_the_wire_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvLayout.from_wire(SMOLLM2.to_wire() | change)
