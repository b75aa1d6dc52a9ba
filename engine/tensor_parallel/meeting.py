"""How the ranks find each other: what Gloo tells the others of a rank goes over the sockets that there are anyway.

Nothing listens for it, nothing lies in a folder, and nobody but the ranks is believed.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from engine.errors import ProtocolError
from engine.tensor_parallel.messages import Channel, Told

Hear = Callable[[], Told]


class MeetingStore(Store):
    """What one rank sets, every other gets. Only while the group is built, by the thread that builds it."""

    def __init__(self, tell: Callable[[Told], None], hear: Hear) -> None:
        """`hear` waits for the next thing that another rank tells; it raises what it likes if nothing comes in time."""
        super().__init__()
        self._tell: Callable[[Told], None] | None = tell
        self._hear: Hear | None = hear
        self._values: dict[str, bytes] = {}

    def seal(self) -> None:
        """The group is built: the sockets carry batches from here on."""
        self._tell = self._hear = None

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._tell is not None:
            self._tell(Told(key=key, value=data))

    def get(self, key: str) -> bytes:
        while key not in self._values:
            if self._hear is None:
                raise ProtocolError(f"the group is built, and nobody has told {key}")
            told = self._hear()
            self._values[told.key] = told.value
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def store_of_rank(channel: Channel) -> MeetingStore:
    """Of a rank above 0, which talks to rank 0 alone."""
    return MeetingStore(channel.send, lambda: _told(channel))


def store_of_first(channels: Sequence[Channel], timeout_s: float) -> MeetingStore:
    """Of rank 0, which tells each of the others what the rest have told."""

    def tell(told: Told) -> None:
        for channel in channels:
            channel.send(told)

    def hear() -> Told:
        ready, _, _ = select.select([channel.connection for channel in channels], [], [], timeout_s)
        speaker = next((channel for channel in channels if channel.connection in ready), None)
        if speaker is None:
            raise ProtocolError(f"no rank told of itself within {timeout_s} s")
        told = _told(speaker)
        for channel in channels:
            if channel is not speaker:
                channel.send(told)
        return told

    return MeetingStore(tell, hear)


def _told(channel: Channel) -> Told:
    message = channel.receive()
    if not isinstance(message, Told):
        raise ProtocolError(f"{type(message).__name__} while the group is built")
    return message
