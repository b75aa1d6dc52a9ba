from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from descriptors import open_descriptors, opened_since

from engine.errors import ConfigError, InternalError
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout

LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="bfloat16")
linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd")


@pytest.fixture
def kv() -> Iterator[KvCache]:
    kv = KvCache(LAYOUT, 5)
    yield kv
    kv.close()


def test_the_pool_is_block_major_and_zero(kv: KvCache) -> None:
    assert kv.pool.shape == (5, 2, 2, 3, 4, 8)
    assert kv.pool.is_contiguous()
    assert kv.pool.dtype == torch.bfloat16
    assert kv.nbytes == 5 * LAYOUT.block_bytes == kv.pool.numel() * 2
    assert torch.count_nonzero(kv.pool) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_of_a_block_are_its_part_of_the_tensor(dtype: str) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype=dtype)
    kv = KvCache(layout, 4)
    kv.pool[2] = torch.randn(layout.shape)
    expected = bytes(kv.pool[2].contiguous().view(torch.uint8).flatten().tolist())

    assert len(kv.block(2)) == layout.block_bytes
    assert bytes(kv.block(2)) == expected
    assert not any(kv.block(1))
    assert not any(kv.block(3))
    kv.close()


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("fp8_e4m3", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_a_quantized_block_holds_its_values_and_its_scales(dtype: str, torch_dtype: torch.dtype) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=6, block_size=4, dtype=dtype)
    kv = KvCache(layout, 4)
    assert kv.scales is not None
    values = torch.randint(-128, 128, layout.shape, dtype=torch.int8)
    scales = torch.randn(layout.scales_shape)

    kv.pool[2] = values.view(torch_dtype)
    kv.scales[2] = scales

    data = bytes(kv.block(2))
    assert len(data) == layout.block_bytes == 384
    assert data[:288] == values.numpy().tobytes()
    assert data[320:368] == scales.numpy().tobytes()
    assert not any(data[288:320] + data[368:])
    assert not any(kv.block(1))
    assert not any(kv.block(3))
    assert (kv.pool.dtype, kv.pool.shape, kv.scales.shape) == (torch_dtype, (4, 2, 2, 3, 4, 6), (4, 2, 2, 3))
    kv.close()


def test_a_pool_that_is_not_quantized_has_no_scales(kv: KvCache) -> None:
    assert kv.scales is None


def test_bytes_written_to_a_block_show_in_the_tensor(kv: KvCache) -> None:
    source = torch.randn(LAYOUT.shape).bfloat16()
    data = bytes(source.view(torch.uint8).flatten().tolist())

    kv.block(4)[:] = data

    assert torch.equal(kv.pool[4], source)


def test_the_address_is_that_of_block_zero(kv: KvCache) -> None:
    kv.block(1)[:3] = b"abc"

    assert ctypes.string_at(kv.address + LAYOUT.block_bytes, 3) == b"abc"


@pytest.mark.parametrize("block", [-1, 5, 1000])
def test_a_block_outside_the_pool_is_refused(kv: KvCache, block: int) -> None:
    with pytest.raises(InternalError, match=f"block {block} is outside the pool of 5 blocks"):
        kv.block(block)


@linux
def test_a_peer_can_map_the_pool_and_read_it(kv: KvCache) -> None:
    assert kv.fd is not None
    kv.pool[3] = 1.5

    with mmap.mmap(kv.fd, kv.nbytes, prot=mmap.PROT_READ) as mapped:
        seen = mapped[3 * LAYOUT.block_bytes : 4 * LAYOUT.block_bytes]

    assert seen == bytes(kv.block(3))


@linux
def test_nobody_with_the_descriptor_can_resize_the_pool(kv: KvCache) -> None:
    assert kv.fd is not None
    for size in (0, kv.nbytes - 1, kv.nbytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(kv.fd, size)


@linux
def test_nobody_with_the_descriptor_can_write_to_the_pool(kv: KvCache) -> None:
    assert kv.fd is not None
    with pytest.raises(PermissionError):
        mmap.mmap(kv.fd, kv.nbytes)
    with pytest.raises(PermissionError):
        os.pwrite(kv.fd, b"x", 0)


def test_a_closed_pool_refuses_access_and_closing_again_does_nothing() -> None:
    kv = KvCache(LAYOUT, 5)
    kv.close()
    kv.close()

    assert kv.closed
    assert kv.fd is None
    with pytest.raises(InternalError, match="closed"):
        kv.block(0)
    with pytest.raises(InternalError, match="closed"):
        _ = kv.address


def test_what_someone_still_holds_stays_valid_after_closing() -> None:
    kv = KvCache(LAYOUT, 5)
    kv.pool[1] = 2.0
    tensor, data = kv.pool[1], kv.block(1)

    kv.close()

    assert torch.equal(tensor, torch.full(LAYOUT.shape, 2.0).bfloat16())
    assert bytes(data[:2]) == bytes(tensor.view(torch.uint8).flatten()[:2].tolist())


@linux
def test_closing_gives_the_descriptor_and_the_memory_back() -> None:
    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("kvrelay-kv" in line for line in maps)

    before, descriptors = mappings(), open_descriptors()
    kv = KvCache(LAYOUT, 5)
    assert mappings() == before + 1

    kv.close()

    assert mappings() == before
    assert not opened_since(descriptors)


@linux
def test_a_pool_that_is_dropped_without_being_closed_leaves_no_descriptor() -> None:
    descriptors = open_descriptors()
    kv = KvCache(LAYOUT, 5)
    assert opened_since(descriptors)

    del kv

    assert not opened_since(descriptors)


@pytest.mark.parametrize("num_blocks", [2**33, 2**50, 2**62])
def test_a_pool_larger_than_the_machine_is_refused_naming_the_setting(num_blocks: int) -> None:
    before = open_descriptors() if sys.platform == "linux" else frozenset()

    with pytest.raises(ConfigError, match="kv_memory_bytes"):
        KvCache(LAYOUT, num_blocks)

    assert sys.platform != "linux" or not opened_since(before)


@linux
@pytest.mark.parametrize("failing", ["memfd_create", "ftruncate"])
def test_a_system_that_has_no_memory_is_reported_naming_the_setting(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    before = open_descriptors()
    monkeypatch.setattr(os, failing, refuse)

    with pytest.raises(ConfigError, match=r"kv_memory_bytes: cannot allocate \d+ bytes.*Cannot allocate memory"):
        KvCache(LAYOUT, 5)

    assert not opened_since(before)


def test_memory_is_not_touched_before_it_is_written() -> None:
    layout = KvLayout(num_layers=16, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    kv = KvCache(layout, 1024 * 1024 * 1024 // layout.block_bytes)

    if kv.fd is not None:
        assert os.fstat(kv.fd).st_blocks == 0
    assert kv.nbytes == 1024 * 1024 * 1024
    kv.close()


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_blocks must be at least 1, got 0"):
        KvCache(LAYOUT, 0)
