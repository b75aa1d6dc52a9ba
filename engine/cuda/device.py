"""What the engine asks of a GPU beside kernels: pinned memory, captured graphs, copies on a stream of their own.

Thin on purpose: `CudaDevice` has no decision in it, and everything else is tested with a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Replay = Callable[[], torch.Tensor]
_cuda: Any = torch.cuda  # streams and events have no types in torch


class Device(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory [nbytes] uint8 that the device copies to and from without a stop."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Run `run` to warm up, then record it. The replay works on the same memory, and gives the same tensor."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """From pinned memory, in the order of compute; does not wait."""

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Into pinned memory; waits for it, and for nothing that comes after it."""

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """On the stream of copies: after all compute so far, and before all compute to come; does not wait."""

    def wait_for_copies(self) -> None:
        """For those aside, and nothing else."""

    def measure(self, run: Callable[[], object]) -> int:
        """The most bytes that this process has allocated at once while `run` ran, what there was before included."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the card."""


class CudaDevice:
    """One GPU of this machine. One thread uses it."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._copies = _cuda.Stream(self._device)
        self._copied, self._downloaded = _cuda.Event(), _cuda.Event()
        self._graph_memory: Any = None

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        warm_up = _cuda.Stream(self._device)
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(2):  # compiles kernels, and lets cuBLAS take its workspace
                run()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = _cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            out = run()
        self._graph_memory = graph.pool()  # one graph runs at a time, so all may use the same memory

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._downloaded.record()
        self._downloaded.synchronize()

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        compute = _cuda.current_stream()
        self._copies.wait_stream(compute)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._copied.record()
        compute.wait_event(self._copied)

    def wait_for_copies(self) -> None:
        self._copied.synchronize()

    def measure(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device))

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)
