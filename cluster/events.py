"""What happened to members, and what is to be done: the words between supervisor and reconciler. Values only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from cluster.spec import SupervisionSpec

ROUTER_ID = "router"


class Phase(Enum):
    ABSENT = "absent"
    """No actor; one is started when the pause is over."""
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Serves what it has and gets nothing new; it is stopped when nothing is left, or when its time is up."""
    DYING = "dying"
    """Asked to stop, or killed; the actor may still live."""


@dataclass(frozen=True, slots=True)
class ActorReady:
    member_id: str
    attempt: int
    address: str


@dataclass(frozen=True, slots=True)
class ActorDied:
    """The actor's process is gone, or will never exist."""

    member_id: str
    attempt: int
    reason: str
    hopeless: bool = False
    """Starting it again would fail in the same way: a wrong setting, a damaged model."""


@dataclass(frozen=True, slots=True)
class MemberHung:
    """The actor's process lives, but has not answered for too long: of no more use than a dead one."""

    member_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemberMustMove:
    """What it runs on goes away soon."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """`error` says what is wrong; None: somebody wanted it so."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class HostLost:
    """What runs the actors is gone, or is given up: no actor can be asked for anything any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolWanted:
    """`revision` stands for all settings that a worker starts with: one of another revision is to be replaced."""

    replicas: int
    revision: Hashable


@dataclass(frozen=True, slots=True)
class DesiredChanged:
    """The cluster shall be this from now on. Saying the same again changes nothing."""

    pools: Mapping[str, PoolWanted]
    """By role."""
    limits: SupervisionSpec
    take_away: str = ""
    """The worker to lose, where a pool shrinks by it. Empty: any."""
    router: Hashable = None
    """Stands for all that the router starts with, like `PoolWanted.revision`."""


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """The router has nothing on this worker any more."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class WorkersConnected:
    """The router has a session with every worker that it was last told of."""

    told: PublishWorkers


Event: TypeAlias = (
    ActorReady
    | ActorDied
    | MemberHung
    | MemberMustMove
    | StopRequested
    | HostLost
    | DesiredChanged
    | WorkerDrained
    | WorkersConnected
)


@dataclass(frozen=True, slots=True)
class StartActor:
    member_id: str
    attempt: int
    role: str
    takes_over: PublishWorkers | None = None
    """A router that listens beside the one that serves, once it is connected to these workers."""


@dataclass(frozen=True, slots=True)
class StopActor:
    """Let it finish what it can, then end it."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class RetireRouter:
    """Another router listens where this one does: let it finish what it has, within the time of a worker that drains,
    then end it."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KillActor:
    member_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishWorkers:
    """Tell the router that exactly these workers serve, and which of them get nothing new."""

    addresses: Mapping[str, str]
    draining: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AwaitDrained:
    """Say `WorkerDrained` once the router has nothing on this worker."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """No actor lives any more. `error` says why the cluster failed; None if it was asked to stop."""

    error: str | None


Instruction: TypeAlias = StartActor | StopActor | RetireRouter | KillActor | PublishWorkers | AwaitDrained | Finish


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as others may see it."""

    member_id: str
    phase: Phase
    attempt: int
    address: str
    last_reason: str
    """Of its last death; empty if there was none."""
    starts_again: bool = False
    """Dead, and to be started again after a pause."""
    role: str = ROUTER_ID
