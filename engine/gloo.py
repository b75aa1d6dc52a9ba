"""Gloo's backend for a group of our own, without torch's global world."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed
from torch._C._distributed_c10d import Store


def gloo_backend(store: Store, rank: int, size: int, host: str, timeout_s: float) -> Any:
    """`torch.distributed`'s `ProcessGroupGloo`, once all `size` ranks have met over `store`; `host` is our address that
    they can reach. Raises `RuntimeError` if they do not meet within `timeout_s`, which also bounds each operation.
    """
    if not distributed.is_gloo_available():
        raise RuntimeError("this torch is built without Gloo")
    process_group: Any = distributed.ProcessGroupGloo  # torch's stubs know half of it
    options = process_group._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [process_group.create_device(hostname=host)]
    return process_group(store, rank, size, options)
