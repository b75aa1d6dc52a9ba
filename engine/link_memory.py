"""What a link needs of a pool whose blocks are on a GPU; `engine.cuda.link_memory` has it. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class LinkMemory(Protocol):
    """Blocks as the thread of one link reaches them: by way of places in pinned host memory, or whole on the GPU.

    Nothing here waits for compute but for that which the blocks need: what the engine had launched when it said that
    they are complete, or may be written.
    """

    @property
    def card(self) -> str:
        """Which GPU: equal at both ends of a link if it is one and the same."""

    @property
    def torch_device(self) -> torch.device:
        """For memory beside the pool."""

    @property
    def num_places(self) -> int: ...

    def place(self, place: int) -> memoryview:
        """The bytes of one place. Raises `LinkClosed` if there is no pinned memory."""

    @property
    def fd(self) -> int | None:
        """Of the memory file that holds the places from its first byte, for a peer on this host; raises likewise."""

    def fetch(self, blocks: Sequence[int]) -> list[int]:
        """Copy them to the next places, round and round, and wait. `num_places` at most."""

    def store(self, places: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each place to its slot, and wait: from then on compute sees it."""

    def tensors(self, blocks: Sequence[int]) -> list[torch.Tensor]:
        """[block_bytes] uint8 each, on the GPU, no copy."""

    def in_order(self) -> AbstractContextManager[None]:
        """What is launched within comes after the compute that the blocks need, and waits for no other."""

    def close(self) -> None:
        """Give the host memory back; nobody copies any more. A second call does nothing."""
