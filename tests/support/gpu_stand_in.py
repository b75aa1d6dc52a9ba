"""A `Device` on the CPU: its graphs run again what they recorded, and every call that orders work is written down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from engine.cuda.device import Copies, Mark, Replay
from engine.cuda.rehearsal import HostDevice


class StandIn(HostDevice):
    def __init__(self, index: int = 0, card: str = "") -> None:
        super().__init__(index)
        self.card = card or self.card
        self.calls: list[str] = []
        self.free, self.total, self.peak = 900_000, 1_000_000, 300_000
        """Bytes that it says there are, and that a step took."""
        self.marks = 0

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        self.calls.append(f"pin {memory.numel()}")
        return lambda: self.calls.append("unpin")

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        self.calls.append("capture")
        out = run()

        def replay() -> torch.Tensor:
            self.calls.append("replay")
            out.copy_(run())  # as a graph does: into the memory that it was captured with
            return out

        return replay

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.calls.append(f"upload {source.numel()}")
        target.copy_(source)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.calls.append("download")
        target.copy_(source)

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.calls.append("copy aside")
        target.copy_(source)

    def wait_for_copies(self) -> None:
        self.calls.append("wait for copies")

    def mark(self) -> Mark:
        self.marks += 1
        self.calls.append("mark")
        return f"mark {self.marks}"

    def copies(self) -> Copies:
        return RecordedCopies(self.calls)

    def measure(self, run: Callable[[], object]) -> int:
        self.calls.append("measure")
        run()
        return self.peak

    def memory(self) -> tuple[int, int]:
        return self.free, self.total


class RecordedCopies:
    """Copies happen when they are waited for: whoever looks before sees what was there."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Mark | None) -> None:
        self._pending += pairs
        self._calls.append(f"copy {len(self._pending)} after {after}")

    def wait(self) -> None:
        for source, target in self._pending:
            target.copy_(source)
        self._pending = []
        self._calls.append("wait")

    @contextmanager
    def in_order(self, after: Mark | None) -> Iterator[None]:
        self._calls.append(f"in order after {after}")
        yield
