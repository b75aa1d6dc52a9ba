"""What the engine asks of a GPU beside kernels: pinned memory, captured graphs, copies on streams of their own.

Thin on purpose: `CudaDevice` has no decision in it, and everything else is tested with a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from engine.errors import ConfigError

Replay = Callable[[], torch.Tensor]
Mark = Any
"""A point in the order of compute: what was launched until then. Of a GPU an event."""
_cuda: Any = torch.cuda  # streams and events have no types in torch


class Copies(Protocol):
    """A stream of copies between a GPU and host memory that it knows. One thread uses it, no matter which."""

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Mark | None) -> None:
        """Each (source, target), once all is done that came before `after`. Does not wait."""

    def wait(self) -> None:
        """Until those copies are done, and for nothing else: as long as the card takes."""

    def in_order(self, after: Mark | None) -> AbstractContextManager[None]:
        """What the thread launches within comes after `after`, and waits for no other compute."""


class Device(Protocol):
    @property
    def torch_device(self) -> torch.device: ...

    @property
    def name(self) -> str:
        """As torch names it: `cuda:0`."""

    @property
    def description(self) -> str:
        """For people: which card it is."""

    @property
    def card(self) -> str:
        """Of no other card in the world, up to 48 characters; in every process the same."""

    def use(self) -> None:
        """What the calling thread launches from now on, it launches there."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory [nbytes] uint8 that the device copies to and from without a stop."""

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        """Make it of host memory that there is. From any thread. Returns what undoes it; raises `RuntimeError`."""

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

    def mark(self) -> Mark:
        """All compute that was launched so far, and copies aside. Does not wait."""

    def copies(self) -> Copies:
        """A new stream for a thread that is not the engine's. From any thread."""

    def measure(self, run: Callable[[], object]) -> int:
        """The most bytes that this process has allocated at once while `run` ran, what there was before included."""

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the card."""


def open_card(name: str) -> CudaDevice:
    """`cuda`, the first that this process sees, or `cuda:N`. Raises `ConfigError` naming `device` if there is none."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "this torch is built for CPUs" if built is None else f"torch, built for CUDA {built}, sees no card"
        raise ConfigError(f"device {name}: {why}")
    index, count = torch.device(name).index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device {name}: this process sees {count} cards, cuda:0 to cuda:{count - 1}")
    try:
        return CudaDevice(index)
    except RuntimeError as error:  # another process has it to itself, or it fails
        raise ConfigError(f"device {name}: {error}") from error


class CudaDevice:
    """One GPU of this machine. One thread uses it, but for what any thread may call."""

    def __init__(self, index: int = 0) -> None:
        self._device = torch.device("cuda", index)
        self.use()
        self._copies = _cuda.Stream(self._device)
        self._copied, self._downloaded = _cuda.Event(), _cuda.Event()
        self._graph_memory: Any = None

    @property
    def torch_device(self) -> torch.device:
        return self._device

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def description(self) -> str:
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"{torch.cuda.get_device_name(self._device)}, sm_{major}{minor}"

    @property
    def card(self) -> str:
        return str(_cuda.get_device_properties(self._device).uuid)

    def use(self) -> None:
        torch.cuda.set_device(self._device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> Callable[[], None]:
        runtime = _cuda.cudart()
        address = memory.data_ptr()
        with torch.cuda.device(self._device):
            _cuda.check_error(int(runtime.cudaHostRegister(address, memory.nbytes, 0)))

        def unpin() -> None:
            with torch.cuda.device(self._device):
                runtime.cudaHostUnregister(address)

        return unpin

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        warm_up, compute = _cuda.Stream(self._device), self._compute()
        warm_up.wait_stream(compute)
        with torch.cuda.stream(warm_up):
            for _ in range(2):  # compiles kernels, and lets cuBLAS take its workspace
                run()
        compute.wait_stream(warm_up)
        graph = _cuda.CUDAGraph()
        # Other threads copy meanwhile, and make events: that is no part of the graph, and must not end it.
        with torch.cuda.graph(graph, pool=self._graph_memory, capture_error_mode="thread_local"):
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
        self._downloaded.record(self._compute())
        self._downloaded.synchronize()

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> None:
        compute = self._compute()
        self._copies.wait_stream(compute)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
            self._copied.record()
        compute.wait_event(self._copied)

    def wait_for_copies(self) -> None:
        self._copied.synchronize()

    def mark(self) -> Mark:
        event = _cuda.Event()
        event.record(self._compute())
        return event

    def copies(self) -> Copies:
        return _CudaCopies(self._device)

    def measure(self, run: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        return int(torch.cuda.max_memory_allocated(self._device))

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def _compute(self) -> Any:
        return _cuda.current_stream(self._device)


class _CudaCopies:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device)
        self._done = _cuda.Event(blocking=True)  # the thread that waits sleeps

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Mark | None) -> None:
        with self.in_order(after):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
            self._done.record()

    def wait(self) -> None:
        self._done.synchronize()

    @contextmanager
    def in_order(self, after: Mark | None) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
