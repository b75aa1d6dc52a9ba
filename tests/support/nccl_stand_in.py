"""Stand-ins for `ProcessGroupNCCL`, for machines without a GPU: one records its calls, one moves bytes over Gloo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import ErrorType, Store

from kv_transfer.process_group import Backend, Work
from kv_transfer.transport_gloo import GlooGroup

Call = tuple[Any, ...]


class Options:
    """As much of `ProcessGroupNCCL.Options` as anybody sets."""

    def __init__(self) -> None:
        self._timeout: timedelta | None = None
        self.config = SimpleNamespace(blocking=None)


@dataclass
class RecordedWork:
    """Done after `looks` looks at it; `look` runs at each."""

    looks: int = 1
    error: Exception | None = None
    look: Callable[[], None] = lambda: None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        raise AssertionError("nobody waits in NCCL")

    def is_completed(self) -> bool:
        self.look()
        self.looks -= 1
        return self.looks < 0

    def exception(self) -> Exception | None:
        return self.error


@dataclass
class RecordingNccl:
    """Every call of the backend in order. What it answers is to be set."""

    calls: list[Call] = field(default_factory=list)
    work: RecordedWork = field(default_factory=RecordedWork)
    error: ErrorType = ErrorType.SUCCESS
    connecting: Callable[[], None] = lambda: None
    sending: Callable[[], None] = lambda: None

    def __call__(self, store: Store, rank: int, size: int, options: Options) -> RecordingNccl:
        """In place of the class."""
        self.calls.append(("construct", rank, size, options._timeout, options.config.blocking))
        return self

    Options = Options

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(("connect", str(device)))
        self.connecting()

    def _start_coalescing(self) -> None:
        self.calls.append(("start",))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("send", [tensor.data_ptr() for tensor in tensors], rank, tag))
        self.sending()

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(("recv", [tensor.data_ptr() for tensor in tensors], rank, tag))

    def _end_coalescing(self) -> RecordedWork:
        self.calls.append(("end",))
        return self.work

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self.calls.append(("abort",))


class _GlooWork:
    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.wait(timedelta(seconds=5)) for work in self._works)

    def exception(self) -> None:
        return None


class NcclOverGloo:
    """Moves the bytes of host memory that only says it is on a GPU."""

    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
        assert options._timeout is not None
        group = GlooGroup.connect(store, rank, "127.0.0.1", options._timeout.total_seconds())
        assert group._backend is not None
        self._gloo: Backend = group._backend
        self._works: list[Work] = []

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def _start_coalescing(self) -> None:
        self._works = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self._works.append(self._gloo.send(tensors, rank, tag))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self._works.append(self._gloo.recv(tensors, rank, tag))

    def _end_coalescing(self) -> _GlooWork:
        return _GlooWork(self._works)

    def get_error(self) -> ErrorType:
        return ErrorType.SUCCESS

    def abort(self) -> None:
        self._gloo.abort()


def install(monkeypatch: pytest.MonkeyPatch, process_group: Any) -> list[str]:
    """`process_group` in place of NCCL's. Returns the devices that threads are set to."""
    devices: list[str] = []
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", process_group, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    return devices
