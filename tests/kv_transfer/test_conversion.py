"""Conversion of KV between layouts gives, bit for bit, what writing the same logical KV in the other layout gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_layout import KV_DTYPE_BYTES, KvLayout, compatible
from kv_transfer.conversion import convert, convert_block, copies, sources_of

WHOLE = KvLayout(num_layers=2, num_kv_heads=4, head_dim=4, block_size=16, dtype="float32")
PLAIN = ("float32", "bfloat16", "float16")
QUANTIZED = ("fp8_e4m3", "int8")
DEGREES = st.sampled_from([1, 2, 4])
BLOCK_SIZES = st.sampled_from([8, 16, 32])

Blocks = dict[int, memoryview]


@st.composite
def whole_layouts(draw: st.DrawFn, dtypes: tuple[str, ...] = PLAIN) -> KvLayout:
    return KvLayout(
        num_layers=draw(st.integers(1, 3)),
        num_kv_heads=4 * draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 4, 6])),
        block_size=draw(BLOCK_SIZES),
        dtype=draw(st.sampled_from(dtypes)),
    )


class Sequence:
    """KV by its logical places, and how each layout writes it; one word of noise for each value and scale."""

    def __init__(self, layout: KvLayout, num_tokens: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_tokens = num_tokens
        self._word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[KV_DTYPE_BYTES[layout.dtype]]
        shape = (layout.num_layers, 2, layout.total_kv_heads, num_tokens, layout.head_dim)
        self._values = rng.integers(1, 255, shape).astype(self._word)
        num_blocks = -(-num_tokens // layout.block_size)
        self._scales = rng.integers(1, 2**32, (num_blocks, *shape[:3]), dtype=np.uint32)

    def blocks(self, layout: KvLayout) -> Blocks:
        """Written value by value, without any of the code under test."""
        written: Blocks = {}
        heads = slice(layout.heads.start, layout.heads.stop)
        for ordinal in range(-(-self.num_tokens // layout.block_size)):
            start = ordinal * layout.block_size
            values: npt.NDArray[np.generic] = np.zeros(layout.shape, dtype=self._word)
            there = self._values[:, :, heads, start : start + layout.block_size]
            for token in range(there.shape[3]):
                values[:, :, :, token] = there[:, :, :, token]
            block = bytearray(layout.block_bytes)
            block[: layout.values_bytes] = values.tobytes()
            if layout.quantized:
                scales = self._scales[ordinal, :, :, heads].tobytes()
                block[layout.scales_offset : layout.scales_offset + len(scales)] = scales
            written[ordinal] = memoryview(block)
        return written


def empty(layout: KvLayout, num_tokens: int) -> Blocks:
    return {n: memoryview(bytearray(layout.block_bytes)) for n in range(-(-num_tokens // layout.block_size))}


def converted(sources: list[tuple[KvLayout, Blocks]], target: KvLayout, num_tokens: int) -> Blocks:
    """A target rank's blocks, of those of all source ranks."""
    blocks = empty(target, num_tokens)
    for layout, held in sources:
        convert(copies(layout, target, blocks, num_tokens), layout, held, target, blocks)
    return blocks


def shards(whole: KvLayout, degree: int) -> Iterator[KvLayout]:
    return (whole.shard(rank, degree) for rank in range(degree))


@given(whole_layouts(), BLOCK_SIZES, DEGREES, DEGREES, st.integers(1, 80), st.integers(0, 9))
def test_every_rank_gets_the_bits_that_it_would_have_written(
    whole: KvLayout, block_size: int, from_degree: int, to_degree: int, num_tokens: int, seed: int
) -> None:
    sequence = Sequence(whole, num_tokens, seed)
    sources = [(layout, sequence.blocks(layout)) for layout in shards(whole, from_degree)]

    for target in shards(replace(whole, block_size=block_size), to_degree):
        assert converted(sources, target, num_tokens) == sequence.blocks(target)


@given(whole_layouts(), BLOCK_SIZES, DEGREES, DEGREES, st.integers(1, 80), st.integers(0, 9))
def test_there_and_back_changes_nothing(
    whole: KvLayout, block_size: int, from_degree: int, to_degree: int, num_tokens: int, seed: int
) -> None:
    sequence = Sequence(whole, num_tokens, seed)
    here = [(layout, sequence.blocks(layout)) for layout in shards(whole, from_degree)]
    other = shards(replace(whole, block_size=block_size), to_degree)
    there = [(layout, converted(here, layout, num_tokens)) for layout in other]

    assert [converted(there, layout, num_tokens) for layout, _ in here] == [blocks for _, blocks in here]


@given(whole_layouts(QUANTIZED), DEGREES, DEGREES, st.integers(1, 80), st.integers(0, 9))
def test_a_slice_of_the_heads_of_quantized_kv_brings_its_scales(
    whole: KvLayout, from_degree: int, to_degree: int, num_tokens: int, seed: int
) -> None:
    sequence = Sequence(whole, num_tokens, seed)
    sources = [(layout, sequence.blocks(layout)) for layout in shards(whole, from_degree)]

    for target in shards(whole, to_degree):
        assert converted(sources, target, num_tokens) == sequence.blocks(target)


@given(whole_layouts(), BLOCK_SIZES, DEGREES, st.data())
def test_one_block_is_made_of_the_blocks_that_it_takes_tokens_from(
    whole: KvLayout, block_size: int, degree: int, data: st.DataObject
) -> None:
    num_tokens = data.draw(st.integers(1, 80))
    target = replace(whole, block_size=block_size).shard(data.draw(st.integers(0, degree - 1)), degree)
    sequence = Sequence(whole, num_tokens, seed=1)
    held, expected = sequence.blocks(whole), sequence.blocks(target)
    ordinal = data.draw(st.sampled_from(sorted(expected)))
    into = memoryview(bytearray(b"\xff" * target.block_bytes))

    convert_block(whole, [held[n] for n in sources_of(whole, target, ordinal, num_tokens)], target, ordinal, into)

    assert into == expected[ordinal]


def test_each_token_of_a_block_is_copied_once() -> None:
    large, small = replace(WHOLE, block_size=32), replace(WHOLE, block_size=8)

    joined = copies(small, large, [0, 1], num_tokens=50)
    cut = copies(large, small, range(7), num_tokens=50)

    assert [token for copy in joined for token in copy.tokens] == list(range(50))
    assert [token for copy in cut for token in copy.tokens] == list(range(50))
    assert [copy.source_block for copy in joined] == [0, 1, 2, 3, 4, 5, 6]
    assert [copy.source_block for copy in cut] == [0, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    "target",
    [
        WHOLE,
        replace(WHOLE, block_size=8),
        replace(WHOLE, block_size=32),
        WHOLE.shard(1, 2),
        replace(WHOLE, block_size=8).shard(3, 4),
    ],
)
def test_layouts_that_differ_in_heads_or_block_size_are_compatible(target: KvLayout) -> None:
    assert compatible(WHOLE, target) is None


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_quantized_layouts_are_compatible_if_no_block_is_cut_or_joined(dtype: str) -> None:
    whole = replace(WHOLE, dtype=dtype)

    assert compatible(whole, whole.shard(1, 2)) is None
    reason = compatible(whole, replace(whole, block_size=8))
    assert reason is not None
    assert reason.startswith("block_size is 16 and 8: a block of")


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        (WHOLE, replace(WHOLE, num_layers=3), "num_layers is 2 and 3"),
        (WHOLE, replace(WHOLE, head_dim=8), "head_dim is 4 and 8"),
        (WHOLE, replace(WHOLE, dtype="bfloat16"), "dtype is 'float32' and 'bfloat16'"),
        (WHOLE, replace(WHOLE, num_kv_heads=2), "total_kv_heads is 4 and 2"),
        (WHOLE, replace(WHOLE, block_size=64), "block_size is 16 and 64: only 8, 16, 32"),
        (replace(WHOLE, block_size=24), WHOLE, "block_size is 24 and 16: only 8, 16, 32"),
        (WHOLE.shard(0, 2), WHOLE, "num_kv_heads: a block with heads 0 to 3 cannot be made of one with 0 to 1"),
        (WHOLE.shard(0, 2), WHOLE.shard(1, 2), "num_kv_heads: a block with heads 2 to 3"),
    ],
)
def test_any_other_pair_is_refused_with_the_field(source: KvLayout, target: KvLayout, reason: str) -> None:
    refusal = compatible(source, target)

    assert refusal is not None
    assert refusal.startswith(reason)


@given(st.data())
def test_pairs_are_compatible_exactly_if_one_sender_has_all_that_a_block_needs(data: st.DataObject) -> None:
    whole = replace(WHOLE, block_size=data.draw(BLOCK_SIZES), dtype=data.draw(st.sampled_from(PLAIN)))
    degree = data.draw(DEGREES)
    source = data.draw(st.sampled_from(list(shards(whole, degree))))
    target = data.draw(st.sampled_from(list(shards(replace(whole, block_size=data.draw(BLOCK_SIZES)), 2))))
    sequence = Sequence(whole, 40, seed=2)

    same = converted([(source, sequence.blocks(source))], target, 40) == sequence.blocks(target)

    assert same == (compatible(source, target) is None)
