"""A `Device` on the CPU: its graphs run again what they recorded, and every call that orders work is written down."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.cuda.device import Replay


class StandIn:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.free, self.total, self.peak = 900_000, 1_000_000, 300_000
        """Bytes that it says there are, and that a step took."""
        self.torch_device = torch.device("cpu")

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

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

    def measure(self, run: Callable[[], object]) -> int:
        self.calls.append("measure")
        run()
        return self.peak

    def memory(self) -> tuple[int, int]:
        return self.free, self.total
