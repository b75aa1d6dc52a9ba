"""What the supervisor needs of whatever runs actors: a `Host` starts them, a `Handle` is one of them. Knows no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cluster.events import PublishWorkers
from cluster.processes import ProcessId


class ActorLost(Exception):
    """The actor's process is gone, or never came to be; the text says why."""


@dataclass(frozen=True, slots=True)
class ReadyReport:
    """What an actor says of itself when it serves."""

    address: str
    incarnation: str
    process: ProcessId | None
    """None if it runs on another machine."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the parts of its start, as it measured them."""
    pool: str = ""
    """A worker's KV pool, in one line."""
    http_address: str = ""
    """Of a router."""
    node_id: str = ""
    """What the host calls the node that it runs on."""


class Handle(Protocol):
    """One actor. After its death every call raises `ActorLost`."""

    async def ready(self) -> ReadyReport:
        """Wait until it serves. Raises `ActorLost`, or the `EngineError` for which it cannot serve."""

    async def gone(self) -> str:
        """Wait until its process is gone; returns why."""

    async def answers(self, timeout_s: float) -> bool:
        """Of an actor that serves: whether it answers a question within `timeout_s`."""

    async def stop(self) -> None:
        """Have it finish what it can and stop serving. Its process lives on until `kill`."""

    async def set_workers(self, addresses: Mapping[str, str], draining: frozenset[str], timeout_s: float) -> str:
        """Of the router: serve with exactly these, but put nothing new on those that are `draining`.

        Returns which of the others are not connected after `timeout_s`, and why.
        """

    async def drained(self, worker_id: str, timeout_s: float) -> bool:
        """Of the router: wait until it has nothing on this worker, but not longer than `timeout_s`; whether it has
        nothing."""

    async def retire(self, drain_s: float) -> None:
        """Of a router, after another one listens where it does: have it finish what it has within `drain_s`, and stop
        serving."""

    def kill(self, *, force: bool) -> None:
        """End the process; with `force` although it may react to nothing. Idempotent; returns before it is gone."""


class Host(Protocol):
    """What runs actors."""

    def start(self, member_id: str, role: str, takes_over: PublishWorkers | None = None) -> Handle:
        """Begin to start the actor of this member, as the newest spec describes its role; returns at once.

        A router that `takes_over` is ready once it is connected to these workers and listens beside the one before.

        Raises `ActorLost` if it cannot even begin.
        """

    async def leaving(self, known: frozenset[str]) -> frozenset[str]:
        """Wait until other nodes than those `known` are about to go away; returns all that are."""

    async def lost(self) -> str:
        """Wait until no actor can be asked for anything any more; returns why."""
