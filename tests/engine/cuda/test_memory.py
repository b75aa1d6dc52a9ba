from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from gpu_stand_in import StandIn

from engine.block_copy import copy_block, host_copies
from engine.cuda.memory import CudaKvCache
from engine.errors import ConfigError, InternalError
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout


def layout_of(dtype: str = "float16") -> KvLayout:
    return KvLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=8, dtype=dtype)


@pytest.fixture
def device() -> StandIn:
    return StandIn()


@pytest.fixture
def kv(device: StandIn) -> Iterator[CudaKvCache]:
    cache = CudaKvCache(layout_of(), 4, device, num_host_blocks=3)
    cache.by_block.copy_(torch.arange(4 * cache.layout.block_bytes).view(4, -1) % 251)
    yield cache
    cache.close()


@pytest.mark.parametrize("dtype", ["float16", "fp8_e4m3", "int8"])
def test_its_views_lie_as_those_of_a_pool_in_host_memory(device: StandIn, dtype: str) -> None:
    ours, theirs = CudaKvCache(layout_of(dtype), 3, device), KvCache(layout_of(dtype), 3)
    assert (ours.pool.shape, ours.pool.stride(), ours.pool.dtype) == (
        theirs.pool.shape,
        theirs.pool.stride(),
        theirs.pool.dtype,
    )
    if theirs.scales is None:
        assert ours.scales is None
    else:
        assert ours.scales is not None
        assert ours.scales.stride() == theirs.scales.stride()
        assert ours.scales.storage_offset() == theirs.scales.storage_offset()
    theirs.close()


def test_a_block_is_copied_within_the_pool(kv: CudaKvCache) -> None:
    before = kv.by_block.clone()
    copy_block(kv, 1, 3)
    assert torch.equal(kv.by_block, before[[0, 1, 2, 1]])


def test_blocks_go_to_pinned_host_memory_and_back_on_the_stream_of_copies(kv: CudaKvCache, device: StandIn) -> None:
    copies, before = host_copies(kv), kv.by_block.clone()
    assert copies is not None
    copies.to_host(2, 0)
    copies.to_pool(0, 1)
    copies.wait()
    assert torch.equal(kv.by_block, before[[0, 2, 2, 3]])
    assert device.calls == ["copy aside", "mark", "copy aside", "mark", "wait for copies"]


def test_without_host_blocks_nothing_moves_there(device: StandIn) -> None:
    assert host_copies(CudaKvCache(layout_of(), 1, device)) is None


def test_host_code_gets_no_bytes_of_a_pool_on_a_gpu(kv: CudaKvCache) -> None:
    for wanted in (lambda: kv.block(0), lambda: kv.address):
        with pytest.raises(InternalError, match="on a GPU"):
            wanted()


@pytest.mark.parametrize("block", [-1, 4])
def test_blocks_outside_the_pool_are_refused(kv: CudaKvCache, block: int) -> None:
    with pytest.raises(InternalError, match="outside the pool of 4 blocks"):
        kv.block_tensor(block)


def test_a_closed_pool_gives_its_memory_back_and_no_block(kv: CudaKvCache) -> None:
    kv.close()
    kv.close()
    assert kv.closed
    assert kv.pool.numel() == 0
    with pytest.raises(InternalError, match="closed"):
        kv.block_tensor(0)


def test_no_room_on_the_card_names_the_setting(device: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(ConfigError, match="gpu_memory_utilization: no 1024 bytes"):
        CudaKvCache(layout_of(), 2, device)
