"""The same logical KV in another layout: other heads of the model in a block, or another number of tokens.

A value of the KV of a sequence has a place that no layout decides: its layer, K or V, its head of the model, its token
and its channel. `compatible` says for which two layouts conversion is possible, and `copies` which ranges of places go
from which block of the source to which block of the target, both counted along the sequence. `convert` carries copies
out. Values are moved bit by bit and never computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kv_layout import KV_DTYPE_BYTES, KvLayout

_WORDS: Mapping[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""To move a value, only its size matters."""


@dataclass(frozen=True, slots=True)
class Copy:
    """All layers, K and V and channels of some heads and tokens, from one block of a sequence to another.

    Strided on both sides, as heads are outermost in a layer's part of a block.
    """

    source_block: int
    target_block: int
    """Ordinals, each in its own layout."""
    heads: range
    """Of the model."""
    tokens: range
    """Of the sequence."""


def sources_of(source: KvLayout, target: KvLayout, ordinal: int, num_tokens: int) -> range:
    """Ordinals of the source blocks that block `ordinal` of the target takes tokens from."""
    tokens = _tokens_of(target, ordinal, num_tokens)
    return range(tokens.start // source.block_size, -(-tokens.stop // source.block_size))


def copies(source: KvLayout, target: KvLayout, ordinals: Iterable[int], num_tokens: int) -> list[Copy]:
    """What fills the target blocks `ordinals` of a sequence of `num_tokens`, as far as `source` has their heads."""
    heads = range(max(source.heads.start, target.heads.start), min(source.heads.stop, target.heads.stop))
    if not heads:
        return []
    made = []
    for ordinal in ordinals:
        wanted = _tokens_of(target, ordinal, num_tokens)
        for block in sources_of(source, target, ordinal, num_tokens):
            held = _tokens_of(source, block, num_tokens)
            tokens = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            made.append(Copy(block, ordinal, heads, tokens))
    return made


def convert(
    made: Iterable[Copy],
    source: KvLayout,
    source_blocks: Mapping[int, memoryview],
    target: KvLayout,
    target_blocks: Mapping[int, memoryview],
) -> None:
    """Carry out `made` between two maps from ordinals to the bytes of blocks. Other bytes stay as they are.

    In a quantized type the scales of the heads are copied too: `made` then cuts no block, as `compatible` says.
    """
    for copy in made:
        from_block, to_block = source_blocks[copy.source_block], target_blocks[copy.target_block]
        from_tokens = _shifted(copy.tokens, -copy.source_block * source.block_size)
        to_tokens = _shifted(copy.tokens, -copy.target_block * target.block_size)
        from_heads = _shifted(copy.heads, -source.heads_before)
        to_heads = _shifted(copy.heads, -target.heads_before)
        values = _values(from_block, source)[:, :, from_heads, from_tokens]
        _values(to_block, target)[:, :, to_heads, to_tokens] = values
        if source.quantized:
            _scales(to_block, target)[:, :, to_heads] = _scales(from_block, source)[:, :, from_heads]


def convert_block(
    source: KvLayout, sources: Sequence[memoryview], target: KvLayout, ordinal: int, into: memoryview
) -> None:
    """Make block `ordinal` of the target of the blocks that `sources_of` names; where they have nothing, zeros."""
    first = ordinal * target.block_size // source.block_size
    num_tokens = min((first + len(sources)) * source.block_size, (ordinal + 1) * target.block_size)
    into[:] = bytes(len(into))
    by_ordinal = dict(enumerate(sources, start=first))
    convert(copies(source, target, [ordinal], num_tokens), source, by_ordinal, target, {ordinal: into})


class Staging:
    """Where blocks of another layout are put together before they leave. Memory for one group of them."""

    def __init__(self, source: KvLayout, target: KvLayout, num_blocks: int) -> None:
        self._source = source
        self._target = target
        self._memory = memoryview(bytearray(num_blocks * target.block_bytes))

    def put(self, place: int, ordinal: int, sources: Sequence[memoryview]) -> memoryview:
        """Block `ordinal` of the target, made of `sources`, in `place` of the group. Valid until the next group."""
        start = place * self._target.block_bytes
        into = self._memory[start : start + self._target.block_bytes]
        convert_block(self._source, sources, self._target, ordinal, into)
        return into


def _tokens_of(layout: KvLayout, ordinal: int, num_tokens: int) -> range:
    start = ordinal * layout.block_size
    return range(min(start, num_tokens), min(start + layout.block_size, num_tokens))


def _shifted(places: range, by: int) -> slice:
    return slice(places.start + by, places.stop + by)


def _values(
    block: memoryview, layout: KvLayout
) -> npt.NDArray[np.generic]:  # [layers, 2 (K, V), kv_heads, block_size, head_dim]
    word_bytes = KV_DTYPE_BYTES[layout.dtype]
    count = layout.values_bytes // word_bytes
    return np.frombuffer(block, dtype=_WORDS[word_bytes], count=count).reshape(layout.shape)


def _scales(block: memoryview, layout: KvLayout) -> npt.NDArray[np.generic]:  # [layers, 2 (K, V), kv_heads]
    count = layout.scales_bytes // 4
    return np.frombuffer(block, dtype=np.uint32, count=count, offset=layout.scales_offset).reshape(layout.scales_shape)
