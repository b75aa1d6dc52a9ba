"""A `Device` on the CPU: the code for GPUs runs whole, with Triton's interpreter in the place of the card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from engine.cuda.device import Copies, Mark, Replay


class HostCopies:
    """Every copy is done when the call returns."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Mark | None) -> None:
        for source, target in pairs:
            target.copy_(source)

    def wait(self) -> None:
        """Nothing is in flight."""

    @contextmanager
    def in_order(self, after: Mark | None) -> Iterator[None]:
        yield


class HostDevice:
    """Everything happens at once; a graph is the function that it is made of. It calls itself a card, so that links
    and engine treat it as one."""

    torch_device = torch.device("cpu")
    description = "rehearsal on the CPU"

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        self.card = f"rehearsal {index}"

    def use(self) -> None:
        """There is no other device."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        run()
        return run

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def wait_for_copies(self) -> None:
        """Nothing is in flight."""

    def mark(self) -> Mark:
        return None

    def copies(self) -> Copies:
        return HostCopies()

    def measure(self, run: Callable[[], object]) -> int:
        run()
        return 0

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30
