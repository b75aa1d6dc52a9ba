"""Desired members of a cluster and what happened to them, in; what to do, out. Pure: no Ray, no clock, no I/O.

A member is the router or one worker. Its life, with what `Reconciler` answers:

    ABSENT ──StartActor──▶ STARTING ──ActorReady──▶ READY ──PublishWorkers──▶ (the router connects to it)
      ▲                       │ │ not ready in time: KillActor                 │
      └──── the pause is over ┘ └──────────────▶ DYING ◀── MemberHung, StopRequested
            ActorDied ◀──────────────────────────┘

Every start of a member has a new `attempt`; events of another attempt than the member's present one are ignored, so a
late word of a dead actor changes nothing. A member is started again only after `ActorDied` said that the actor before
is gone: two actors of one member never live at once.

On a stop the router goes first, so that clients hear of it from the router, then all workers, then `Finish`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
class StopRequested:
    """`error` says what is wrong; None: somebody wanted it so."""

    error: str | None = None


@dataclass(frozen=True, slots=True)
class HostLost:
    """What runs the actors is gone, or is given up: no actor can be asked for anything any more."""

    reason: str


Event: TypeAlias = ActorReady | ActorDied | MemberHung | StopRequested | HostLost


@dataclass(frozen=True, slots=True)
class StartActor:
    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class StopActor:
    """Let it finish what it can, then end it."""

    member_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class KillActor:
    member_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishWorkers:
    """Tell the router that exactly these workers serve."""

    addresses: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Finish:
    """No actor lives any more. `error` says why the cluster failed; None if it was asked to stop."""

    error: str | None


Instruction: TypeAlias = StartActor | StopActor | KillActor | PublishWorkers | Finish


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


@dataclass(slots=True)
class _Member:
    member_id: str
    phase: Phase = Phase.ABSENT
    attempt: int = 0
    """Of the present or the last actor; 0: none yet."""
    due: float | None = None
    """ABSENT: when to start. STARTING: when to give up waiting."""
    address: str = ""
    ready_at: float = 0.0
    failures: int = 0
    """Deaths without `stable_s` of service in between; they set the pause."""
    served: bool = False
    """Whether it was ever ready."""
    last_reason: str = ""


class Reconciler:
    """Owns what each member shall be and is.

    Invariants, checked by `check_integrity`:
      1. A member has at most one actor: `attempt` grows only in phase ABSENT.
      2. Only READY members have an address; only those are published.
      3. While no stop is wanted, every member that is ABSENT or STARTING has a time at which something happens.
      4. After `Finish` no member has an actor.
    """

    def __init__(self, worker_ids: Iterable[str], limits: SupervisionSpec) -> None:
        self._limits = limits
        # In the order in which they are started: workers take longer.
        self._members = {member_id: _Member(member_id) for member_id in (*worker_ids, ROUTER_ID)}
        self._published: dict[str, str] | None = None
        """What the present router was last told; None: nothing yet."""
        self._stopping = False
        self._error: str | None = None
        self._finished = False

    def start(self, now: float) -> list[Instruction]:
        """Bring every member up."""
        for member in self._members.values():
            member.due = now
        return self.tick(now)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case ActorReady():
                return self._ready(event, now)
            case ActorDied():
                return self._died(event, now)
            case MemberHung():
                return self._hung(event, now)
            case StopRequested():
                return self._stop(event.error)
            case HostLost():
                return self._give_up(event.reason)

    def tick(self, now: float) -> list[Instruction]:
        """What became due. Call it when `next_due` has come; earlier or later calls do no harm."""
        instructions: list[Instruction] = []
        for member in self._members.values():
            if member.due is None or member.due > now or self._stopping:
                continue
            if member.phase is Phase.ABSENT:
                member.attempt += 1
                member.phase = Phase.STARTING
                member.due = now + self._limits.start_timeout_s
                instructions.append(StartActor(member.member_id, member.attempt))
            elif member.phase is Phase.STARTING:
                member.phase = Phase.DYING
                member.due = None
                member.last_reason = f"not ready within {self._limits.start_timeout_s:g} s"
                instructions.append(KillActor(member.member_id, member.attempt, member.last_reason))
        return instructions

    @property
    def next_due(self) -> float | None:
        """When `tick` has something to do; None: only events change anything."""
        if self._stopping:
            return None
        return min((member.due for member in self._members.values() if member.due is not None), default=None)

    @property
    def all_ready(self) -> bool:
        return all(member.phase is Phase.READY for member in self._members.values())

    @property
    def finished(self) -> bool:
        return self._finished

    def views(self) -> tuple[MemberView, ...]:
        """The router first, then the workers in the order of the spec."""
        views = [
            MemberView(
                member_id=member.member_id,
                phase=member.phase,
                attempt=member.attempt,
                address=member.address,
                last_reason=member.last_reason,
                starts_again=member.phase is Phase.ABSENT and member.due is not None and member.attempt > 0,
            )
            for member in self._members.values()
        ]
        return (views[-1], *views[:-1])

    def _ready(self, event: ActorReady, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase is not Phase.STARTING:
            return []
        member.phase = Phase.READY
        member.address = event.address
        member.ready_at = now
        member.served = True
        member.due = None
        if member.member_id == ROUTER_ID:
            self._published = None  # a new router knows no worker
        return self._publish()

    def _died(self, event: ActorDied, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase is Phase.ABSENT:
            return []
        if member.phase is not Phase.DYING:
            member.last_reason = event.reason
        self._judge_service(member, now)
        member.failures += 1
        member.phase = Phase.ABSENT
        member.address = ""
        if self._stopping:
            member.due = None
            return self._go_on_stopping()
        # What served once is worth another try, whatever the error: a router's port may still be closing.
        if not member.served and (event.hopeless or member.failures >= self._limits.max_first_starts):
            return self._stop(f"{member.member_id}: {member.last_reason}")
        member.due = now + self._pause(member.failures)
        return self._publish()

    def _hung(self, event: MemberHung, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase is not Phase.READY or self._stopping:
            return []  # on a stop it is killed anyway if it does not end in time
        self._judge_service(member, now)
        member.phase = Phase.DYING
        member.address = ""
        member.last_reason = event.reason
        return [KillActor(member.member_id, member.attempt, event.reason), *self._publish()]

    def _judge_service(self, member: _Member, now: float) -> None:
        if member.phase is Phase.READY and now - member.ready_at >= self._limits.stable_s:
            member.failures = 0

    def _pause(self, failures: int) -> float:
        # The exponent is capped too: 2.0**1024 overflows.
        return min(self._limits.backoff_min_s * 2.0 ** min(failures - 1, 32), self._limits.backoff_max_s)

    def _publish(self) -> list[Instruction]:
        if self._stopping or self._members[ROUTER_ID].phase is not Phase.READY:
            return []
        addresses = {
            member.member_id: member.address
            for member in self._members.values()
            if member.phase is Phase.READY and member.member_id != ROUTER_ID
        }
        if addresses == self._published:
            return []
        self._published = addresses
        return [PublishWorkers(addresses)]

    def _stop(self, error: str | None) -> list[Instruction]:
        if self._stopping:
            return []
        self._stopping = True
        self._error = error
        for member in self._members.values():
            member.due = None
        return self._go_on_stopping()

    def _give_up(self, reason: str) -> list[Instruction]:
        if self._finished:
            return []
        if not self._stopping:  # else it was going anyway
            self._error = reason
        self._stopping = self._finished = True
        for member in self._members.values():
            member.phase, member.address, member.due = Phase.ABSENT, "", None
        return [Finish(self._error)]

    def _go_on_stopping(self) -> list[Instruction]:
        router = self._members[ROUTER_ID]
        workers = [member for member in self._members.values() if member is not router]
        instructions = self._end([router])
        if router.phase is Phase.ABSENT:
            instructions += self._end(workers)
        else:  # a worker that does not serve yet has nothing to finish
            instructions += self._end([member for member in workers if member.phase is Phase.STARTING])
        if all(member.phase is Phase.ABSENT for member in self._members.values()) and not self._finished:
            self._finished = True
            instructions.append(Finish(self._error))
        return instructions

    def _end(self, members: Iterable[_Member]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for member in members:
            if member.phase is Phase.READY:
                instructions.append(StopActor(member.member_id, member.attempt))
            elif member.phase is Phase.STARTING:
                instructions.append(KillActor(member.member_id, member.attempt, "the cluster stops"))
            else:
                continue
            member.phase = Phase.DYING
            member.address = ""
        return instructions

    def _present(self, member_id: str, attempt: int) -> _Member | None:
        member = self._members.get(member_id)
        return member if member is not None and member.attempt == attempt else None

    def check_integrity(self) -> None:
        for member in self._members.values():
            assert (member.phase is Phase.READY) == bool(member.address), (
                f"{member.member_id}: address and phase differ"
            )
            if not self._stopping and member.phase in (Phase.ABSENT, Phase.STARTING) and member.attempt:
                assert member.due is not None, f"{member.member_id} is {member.phase.value} for ever"
            if self._finished:
                assert member.phase is Phase.ABSENT, f"{member.member_id} is {member.phase.value} after the end"
        if self._published is not None and self._members[ROUTER_ID].phase is Phase.READY and not self._stopping:
            ready = {m.member_id for m in self._members.values() if m.phase is Phase.READY} - {ROUTER_ID}
            assert self._published.keys() == ready, "the router was told of other workers than those that are ready"
