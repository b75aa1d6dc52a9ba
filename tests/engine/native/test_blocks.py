"""What native code says of KV blocks is what Python says, on every instruction set that this machine has."""

from __future__ import annotations

import ctypes
import mmap
import random
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pool import LAYOUT, MemoryPool

from engine.errors import InternalError
from engine.native import build
from engine.native.blocks import LEVELS, STREAMED_BYTES, NativeBlockCopier, SharedPool, best_level, load_block_copier
from kv_transfer.digest import PythonBlockCopier


@pytest.fixture(scope="module", params=range(len(LEVELS)), ids=LEVELS)
def copier(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NativeBlockCopier:
    library = build.load("blocks.c", tmp_path_factory.getbasetemp() / "native")
    if request.param > best_level(library):
        pytest.skip(f"this machine has no {LEVELS[request.param]}")
    return NativeBlockCopier(library, request.param)


lengths = st.integers(1, 5000) | st.builds(lambda n, off: 1024 * n + off, st.integers(1, 40), st.integers(-70, 70))


@settings(max_examples=300, deadline=None)
@given(length=lengths, start=st.integers(0, 130), seed=st.integers(0, 2**32))
def test_the_digest_is_the_one_of_xxhash(copier: NativeBlockCopier, length: int, start: int, seed: int) -> None:
    memory = memoryview(bytearray(random.Random(seed).randbytes(start + length)))

    assert copier.digests([memory[start:]]) == [xxhash.xxh3_128_digest(memory[start:])]


@settings(max_examples=200, deadline=None)
@given(
    length=lengths,
    source_at=st.integers(0, 130),
    slot_at=st.sampled_from([0, 1, 63, 64, 100]),
    seed=st.integers(0, 2**32),
)
def test_a_slot_gets_its_bytes_and_nothing_beside_it_changes(
    copier: NativeBlockCopier, length: int, source_at: int, slot_at: int, seed: int
) -> None:
    pool = memoryview(random.Random(seed).randbytes(source_at + length))
    target = bytearray(b"\xaa" * (slot_at + length + 100))
    block = pool[source_at:]

    digests = copier.copy([memoryview(target)[slot_at : slot_at + length]], pool, [source_at])

    assert digests == [xxhash.xxh3_128_digest(block)]
    assert target == b"\xaa" * slot_at + bytes(block) + b"\xaa" * 100


@pytest.mark.parametrize("at", [0, 8], ids=["aligned", "unaligned"])
def test_many_blocks_go_where_they_should_past_the_caches_too(copier: NativeBlockCopier, at: int) -> None:
    length, count = 96 * 1024 + 200, 16
    assert length * count > STREAMED_BYTES
    pool = memoryview(random.Random(1).randbytes(length * count))
    target = memoryview(mmap.mmap(-1, (length + 100) * count + at))
    places = [at + (length + 100) * n for n in random.Random(2).sample(range(count), count)]
    offsets = [length * n for n in range(count)]

    digests = copier.copy([target[place : place + length] for place in places], pool, offsets)

    blocks = [pool[offset : offset + length] for offset in offsets]
    assert digests == [xxhash.xxh3_128_digest(block) for block in blocks]
    assert all(target[place : place + length] == block for place, block in zip(places, blocks, strict=True))


@pytest.mark.parametrize("block_size", [1, 16], ids=["too short to digest natively", "native"])
def test_blocks_of_one_pool_get_into_slots_of_another(copier: NativeBlockCopier, block_size: int) -> None:
    layout = replace(LAYOUT, num_layers=1, num_kv_heads=1, head_dim=16, block_size=block_size)
    source, target = MemoryPool(layout, 4), MemoryPool(layout, 4)
    source.fill(seed=1)
    whole = SharedPool(memoryview(b"".join(bytes(source.block(n)) for n in range(4))))

    digests = copier.copy_blocks(whole, [3, 0], target, [1, 2])

    assert [bytes(target.block(n)) for n in (1, 2)] == [bytes(source.block(n)) for n in (3, 0)]
    assert digests == b"".join(xxhash.xxh3_128_digest(source.block(n)) for n in (3, 0))
    assert digests == PythonBlockCopier().copy_blocks(whole, [3, 0], target, [1, 2])
    with pytest.raises(InternalError, match="of the pool"):
        copier.copy_blocks(whole, [4], target, [1])
    source.close()
    target.close()


@pytest.mark.parametrize("length", [100, 1000, STREAMED_BYTES + 40])
@pytest.mark.parametrize("at", [0, 8], ids=["aligned", "unaligned"])
def test_a_copy_without_digest_is_the_same_bytes(copier: NativeBlockCopier, length: int, at: int) -> None:
    source = bytearray(random.Random(4).randbytes(length))
    target = mmap.mmap(-1, length + at + 100)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source)]

    copier._call([addresses[0] + at], [addresses[1]], length, None)

    assert target[at : at + length] == source
    assert not any(target[:at])
    assert not any(target[at + length :])


@pytest.mark.parametrize("length", [5 * 1024 + 40, 1024, 200 * 1024 + 700])
@pytest.mark.parametrize("shift", [8, 512])
def test_the_digest_is_of_what_the_slot_got_even_if_the_source_changes_in_the_middle(
    copier: NativeBlockCopier, length: int, shift: int
) -> None:
    memory = memoryview(bytearray(random.Random(3).randbytes(length + shift)))
    slot = memory[:length]  # writing it changes what was read just before

    assert copier.copy([slot], memory, [shift]) == [xxhash.xxh3_128_digest(slot)]


@pytest.mark.parametrize("offsets", [[-1], [1], [0, 0], []])
def test_what_lies_outside_the_pool_is_not_read(copier: NativeBlockCopier, offsets: list[int]) -> None:
    with pytest.raises(InternalError, match="are not 1 of the pool"):
        copier.copy([memoryview(bytearray(1000))], memoryview(bytes(1000)), offsets)


def test_blocks_of_several_lengths_are_refused(copier: NativeBlockCopier) -> None:
    with pytest.raises(InternalError, match=r"blocks of \[1000, 1001\] bytes"):
        copier.digests([memoryview(bytearray(1000)), memoryview(bytearray(1001))])


def test_a_loaded_copier_names_the_best_instruction_set(tmp_path: Path) -> None:
    loaded = load_block_copier(tmp_path)

    assert loaded.name == LEVELS[best_level(build.load("blocks.c", tmp_path))]
