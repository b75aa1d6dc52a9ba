"""What an order to a cluster took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvrelay.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class ClusterChange:
    """Not `changed`: it was so already."""

    changed: bool
    lines: tuple[str, ...]
    """For people."""

    @classmethod
    def from_proto(cls, message: router_pb2.ClusterChange) -> Self:
        return cls(message.changed, tuple(message.lines))
