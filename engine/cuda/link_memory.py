"""Pinned host memory and a stream of copies between a pool on a GPU and one link. See `engine.link_memory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError, InternalError, LinkClosed
from engine.kv_cache import KvCache

if TYPE_CHECKING:
    from engine.cuda.memory import CudaKvCache


class CardLinkMemory:
    """A `LinkMemory`. The places are made when they are first wanted: what goes whole needs none."""

    def __init__(self, kv: CudaKvCache, num_places: int) -> None:
        self.card = kv.gpu.card
        self.torch_device = kv.gpu.torch_device
        self.num_places = num_places
        self._kv = kv
        self._copies = kv.gpu.copies()
        self._host: KvCache | None = None
        self._by_place = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], None] = lambda: None
        self._next = 0

    @property
    def fd(self) -> int | None:
        return self._places().fd

    def place(self, place: int) -> memoryview:
        return self._places().block(place)

    def fetch(self, blocks: Sequence[int]) -> list[int]:
        if len(blocks) > self.num_places:
            raise InternalError(f"{len(blocks)} blocks at once, the link has {self.num_places} places")
        self._places()
        places = [(self._next + n) % self.num_places for n in range(len(blocks))]
        self._next = (self._next + len(blocks)) % self.num_places
        sources = self.tensors(blocks)
        pairs = [(source, self._by_place[place]) for source, place in zip(sources, places, strict=True)]
        self._copies.copy(pairs, self._kv.last_mark)
        self._copies.wait()
        return places

    def store(self, places: Sequence[int], slots: Sequence[int]) -> None:
        pairs = [(self._by_place[place], target) for place, target in zip(places, self.tensors(slots), strict=True)]
        self._copies.copy(pairs, self._kv.last_mark)
        self._copies.wait()

    def tensors(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        return [self._kv.block_tensor(block) for block in blocks]

    def in_order(self) -> AbstractContextManager[None]:
        return self._copies.in_order(self._kv.last_mark)

    def close(self) -> None:
        self._by_place = self._by_place.new_empty(0)
        self._unpin()
        self._unpin = lambda: None
        if self._host is not None:
            self._host.close()

    def _places(self) -> KvCache:
        if self._host is None:
            try:
                host = KvCache(self._kv.layout, self.num_places)
            except ConfigError as error:
                raise LinkClosed(f"no host memory for a link: {error}") from error
            by_byte = torch.frombuffer(host.block(0).obj, dtype=torch.uint8, count=host.nbytes)
            try:
                self._unpin = self._kv.gpu.pin(by_byte)
            except RuntimeError as error:
                host.close()
                raise LinkClosed(f"no pinned host memory for a link: {error}") from error
            self._host, self._by_place = host, by_byte.view(self.num_places, -1)
        return self._host
