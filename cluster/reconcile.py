"""Desired members of a cluster and what happened to them, in; what to do, out. Pure: no Ray, no clock, no I/O.

A member is the router or one worker. Its life, with what `Reconciler` answers:

    ABSENT ──StartActor──▶ STARTING ──ActorReady──▶ READY ──PublishWorkers──▶ (the router connects to it)
      ▲                       │ │                     │ taken away or replaced: the router sends it nothing new
      │                       │ │                     ▼
      │                       │ │                 DRAINING ── WorkerDrained, or its time is up
      │                       │ │ not ready in time   ▼
      └──── the pause is over ┘ └──────────────▶ DYING ◀── MemberHung, StopRequested
            ActorDied ◀──────────────────────────┘

What there shall be is said by `DesiredChanged`; `steering` says which workers that costs. A worker whose time to drain
is up is unpublished before it is stopped: what it still has goes on elsewhere.

Every start of a member has a new `attempt`; events of another attempt than the member's present one are ignored, so a
late word of a dead actor changes nothing. A member is started again only after `ActorDied` said that the actor before
is gone: two actors of one member never live at once.

A router with other settings is started beside the one that serves, and takes its ports over (`succession`): then the
older one finishes what it has and ends. Only one of both happens at a time, a worker's change or the router's.

On a stop the router goes first, so that clients hear of it from the router, then all workers, then `Finish`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping

from cluster.events import (
    ROUTER_ID,
    ActorDied,
    ActorReady,
    AwaitDrained,
    DesiredChanged,
    Event,
    Finish,
    HostLost,
    Instruction,
    KillActor,
    MemberHung,
    MemberMustMove,
    MemberView,
    Phase,
    PoolWanted,
    PublishWorkers,
    RetireRouter,
    StartActor,
    StopActor,
    StopRequested,
    WorkerDrained,
    WorkersConnected,
)
from cluster.member_state import MemberState
from cluster.spec import SupervisionSpec
from cluster.steering import Add, Replace, Standing, TakeAway, steer
from cluster.succession import Succession


class Reconciler:
    """Owns what each member shall be and is.

    Invariants, checked by `check_integrity`:
      1. A worker has at most one actor: `attempt` grows only in phase ABSENT. Of the router there are two at most while
         one takes over.
      2. Only READY and DRAINING members have an address; exactly those are published.
      3. While no stop is wanted, every member that is not READY or DYING has a time at which something happens.
      4. After `Finish` no member has an actor.
      5. The attempts of a member id only grow, also of one that was taken away and comes back.
    """

    def __init__(self, pools: Mapping[str, PoolWanted], limits: SupervisionSpec, router: Hashable = None) -> None:
        """`pools` by role; the router comes with them, of this revision."""
        self._limits = limits
        self._router_revision = router
        self._succession = Succession()
        self._pools = dict(pools)
        self._members = {ROUTER_ID: MemberState(ROUTER_ID)}
        self._attempts: dict[str, int] = {}
        """Of members that were taken away."""
        self._published: PublishWorkers | None = None
        """What the present router was last told; None: nothing yet."""
        self._connected = False
        """The router has a session with everyone in `_published`."""
        self._came_up = False
        """Every member served at once. Before, a worker that cannot start fails the cluster; after, only itself."""
        self._stopping = False
        self._error: str | None = None
        self._finished = False

    def start(self, now: float) -> list[Instruction]:
        """Bring every member up, workers first: they take longer."""
        return [*self._steer(now), self._start(self._members[ROUTER_ID], now)]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        instructions = self._take(event, now)
        return instructions if self._stopping else [*instructions, *self._steer(now)]

    def _take(self, event: Event, now: float) -> list[Instruction]:
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
            case DesiredChanged():
                return self._desire(event, now)
            case WorkerDrained():
                member = self._present(event.member_id, event.attempt)
                draining = member is not None and member.phase is Phase.DRAINING
                return self._release(member) if member is not None and draining else []
            case MemberMustMove():
                member = self._present(event.member_id, event.attempt)
                if member is not None:
                    member.must_move = True
                return []
            case WorkersConnected():
                self._connected = self._connected or event.told == self._published
                return []

    def tick(self, now: float) -> list[Instruction]:
        """What became due. Call it when `next_due` has come; earlier or later calls do no harm."""
        instructions: list[Instruction] = []
        for member in self._all():
            if member.due is None or member.due > now or self._stopping:
                continue
            if member.phase is Phase.ABSENT:
                instructions.append(self._start(member, now))
            elif member.phase is Phase.DRAINING:
                instructions += self._release(member)
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
        return min((member.due for member in self._all() if member.due is not None), default=None)

    @property
    def all_ready(self) -> bool:
        """Everything serves, and the router is connected to it."""
        return self._connected and all(member.phase is Phase.READY for member in self._members.values())

    @property
    def settled(self) -> bool:
        """All is as it is wanted; only events change anything."""
        return self.all_ready and not self._steps() and not self._succession.under_way and not self._router_is_stale

    @property
    def finished(self) -> bool:
        return self._finished

    def views(self) -> tuple[MemberView, ...]:
        """The router first, then the workers in the order in which they were added, then routers beside the first."""
        return tuple(member.view(name) for name, member in (*self._members.items(), *self._succession.names()))

    def _ready(self, event: ActorReady, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase is not Phase.STARTING:
            return []
        member.phase = Phase.READY
        member.address = event.address
        member.ready_at = now
        member.served = True
        member.due = None
        retired: list[Instruction] = []
        if member is self._succession.next:
            old, self._members[ROUTER_ID] = self._members[ROUTER_ID], member
            self._succession.take_over(old)
            retired = [RetireRouter(ROUTER_ID, old.attempt)]
        if member.member_id == ROUTER_ID:
            self._published = None  # a new router knows no worker, or those of a moment ago
        self._came_up = self._came_up or all(each.phase is Phase.READY for each in self._members.values())
        return [*retired, *self._publish()]

    def _died(self, event: ActorDied, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase is Phase.ABSENT:
            return []
        if member.phase is not Phase.DYING:
            member.last_reason = event.reason
        member.judge_service(self._limits, now)
        member.failures += 1
        member.phase = Phase.ABSENT
        member.address = ""
        if member is self._succession.old:
            self._succession.old = None
            return self._go_on_stopping() if self._stopping else []
        if self._stopping:
            member.due = None
            return self._go_on_stopping()
        if member is self._members[ROUTER_ID] and (heir := self._succession.promote()) is not None:
            self._members[ROUTER_ID] = heir
            return []
        if member.leaving:
            self._forget(member)
        elif member.ending:
            member.ending, member.failures, member.due = False, 0, now
            return [*self._publish(), self._start(member, now)]
        # What served once is worth another try, whatever the error: a router's port may still be closing.
        elif not (member.served or self._came_up) and (
            event.hopeless or member.failures >= self._limits.max_first_starts
        ):
            return self._stop(f"{member.member_id}: {member.last_reason}")
        else:
            member.due = now + member.pause_s(self._limits)
        return self._publish()

    def _hung(self, event: MemberHung, now: float) -> list[Instruction]:
        member = self._present(event.member_id, event.attempt)
        if member is None or member.phase not in (Phase.READY, Phase.DRAINING) or self._stopping:
            return []  # on a stop it is killed anyway if it does not end in time
        member.judge_service(self._limits, now)
        member.phase = Phase.DYING
        member.address = ""
        member.due = None
        member.last_reason = event.reason
        return [KillActor(member.member_id, member.attempt, event.reason), *self._publish()]

    def _desire(self, event: DesiredChanged, now: float) -> list[Instruction]:
        self._pools, self._limits, self._router_revision = dict(event.pools), event.limits, event.router
        member = self._members.get(event.take_away)
        if member is None or member.role == ROUTER_ID or self._stopping:
            return []
        staying = sum(each.role == member.role and not each.leaving for each in self._members.values())
        # Said again, it must not take away another one.
        return self._take_away(member, now) if staying > self._pools[member.role].replicas else []

    def _steps(self) -> list[Add | TakeAway | Replace]:
        staying = [member for member in self._members.values() if member.role != ROUTER_ID and not member.leaving]
        workers = [Standing(m.member_id, m.number, m.role, m.phase, self._is_stale(m)) for m in staying]
        calm = self.all_ready and len(workers) == len(self._members) - 1 and not self._succession.under_way
        return steer(self._pools, workers, calm=calm)

    def _is_stale(self, worker: MemberState) -> bool:
        started = worker.phase in (Phase.STARTING, Phase.READY)
        return started and (worker.must_move or worker.revision != self._pools[worker.role].revision)

    def _steer(self, now: float) -> list[Instruction]:
        """Until only an event changes anything: each step leaves its worker in another state."""
        instructions: list[Instruction] = []
        while steps := self._steps():
            for step in steps:
                match step:
                    case Add(role):
                        instructions.append(self._start(self._new_worker(role), now))
                    case TakeAway(member_id):
                        instructions += self._take_away(self._members[member_id], now)
                    case Replace(member_id):
                        instructions += self._let_end(self._members[member_id], "its settings have changed", now)
        return [*instructions, *self._steer_router(now)]

    def _steer_router(self, now: float) -> list[Instruction]:
        """With everything else at rest, the successor of a router that has other settings than are wanted."""
        if not self._router_is_stale:
            self._succession.forget_failed()
        if not self.all_ready or self._succession.under_way or not self._router_is_stale:
            return []
        return [self._start(self._succession.begin(self._members[ROUTER_ID]), now)]

    @property
    def _router_is_stale(self) -> bool:
        return self._members[ROUTER_ID].revision != self._router_revision

    def _new_worker(self, role: str) -> MemberState:
        number = next(n for n in itertools.count() if f"{role}-{n}" not in self._members)
        name = f"{role}-{number}"
        member = self._members[name] = MemberState(name, role, number, attempt=self._attempts.get(name, 0))
        return member

    def _forget(self, member: MemberState) -> None:
        self._attempts[member.member_id] = member.attempt
        del self._members[member.member_id]

    def _start(self, member: MemberState, now: float) -> Instruction:
        member.attempt += 1
        member.phase, member.must_move = Phase.STARTING, False
        member.due = now + self._limits.start_timeout_s
        if member.role == ROUTER_ID:
            member.revision = self._router_revision
            takes_over = self._published if member is self._succession.next else None
            return StartActor(member.member_id, member.attempt, member.role, takes_over)
        member.revision = self._pools[member.role].revision
        return StartActor(member.member_id, member.attempt, member.role)

    def _take_away(self, member: MemberState, now: float) -> list[Instruction]:
        member.leaving = True
        if member.phase is Phase.ABSENT:
            self._forget(member)
            return []
        return self._let_end(member, "it is not wanted any more", now)

    def _let_end(self, member: MemberState, reason: str, now: float) -> list[Instruction]:
        member.ending = True
        if member.phase is Phase.STARTING:
            member.phase, member.due, member.last_reason = Phase.DYING, None, reason
            return [KillActor(member.member_id, member.attempt, reason)]
        if member.phase is not Phase.READY:
            return []
        member.phase, member.due = Phase.DRAINING, now + self._limits.worker_drain_s
        if self._members[ROUTER_ID].phase is not Phase.READY:  # it has no request then
            return self._release(member)
        return [*self._publish(), AwaitDrained(member.member_id, member.attempt)]

    def _release(self, member: MemberState) -> list[Instruction]:
        """First the router gives it up, so that what is left goes on elsewhere."""
        member.phase, member.address, member.due = Phase.DYING, "", None
        member.last_reason = "stopped"
        return [*self._publish(), StopActor(member.member_id, member.attempt)]

    def _publish(self) -> list[Instruction]:
        if self._stopping or self._members[ROUTER_ID].phase is not Phase.READY:
            return []
        serving = [member for member in self._members.values() if member.address and member.role != ROUTER_ID]
        draining = frozenset(member.member_id for member in serving if member.phase is Phase.DRAINING)
        told = PublishWorkers({member.member_id: member.address for member in serving}, draining)
        if told == self._published:
            return []
        self._published, self._connected = told, False
        return [told]

    def _stop(self, error: str | None) -> list[Instruction]:
        if self._stopping:
            return []
        self._stopping = True
        self._error = error
        for member in self._all():
            member.due = None
        old = self._succession.old  # its end is hurried
        hurried: list[Instruction] = [] if old is None else [StopActor(ROUTER_ID, old.attempt)]
        return [*hurried, *self._go_on_stopping()]

    def _give_up(self, reason: str) -> list[Instruction]:
        if self._finished:
            return []
        if not self._stopping:  # else it was going anyway
            self._error = reason
        self._stopping = self._finished = True
        self._succession = Succession()
        for member in self._members.values():
            member.phase, member.address, member.due = Phase.ABSENT, "", None
        return [Finish(self._error)]

    def _go_on_stopping(self) -> list[Instruction]:
        routers = [self._members[ROUTER_ID], *self._succession]
        workers = [member for member in self._members.values() if member.role != ROUTER_ID]
        instructions = self._end(routers)
        if all(router.phase is Phase.ABSENT for router in routers):
            instructions += self._end(workers)
        else:  # a worker that does not serve yet has nothing to finish
            instructions += self._end([member for member in workers if member.phase is Phase.STARTING])
        if all(member.phase is Phase.ABSENT for member in self._all()) and not self._finished:
            self._finished = True
            instructions.append(Finish(self._error))
        return instructions

    def _end(self, members: Iterable[MemberState]) -> list[Instruction]:
        instructions: list[Instruction] = []
        for member in members:
            if member.phase in (Phase.READY, Phase.DRAINING):
                instructions.append(StopActor(member.member_id, member.attempt))
            elif member.phase is Phase.STARTING:
                instructions.append(KillActor(member.member_id, member.attempt, "the cluster stops"))
            else:
                continue
            member.phase = Phase.DYING
            member.address = ""
        return instructions

    def _present(self, member_id: str, attempt: int) -> MemberState | None:
        return next((each for each in self._all() if (each.member_id, each.attempt) == (member_id, attempt)), None)

    def _all(self) -> list[MemberState]:
        return [*self._members.values(), *self._succession]

    def check_integrity(self) -> None:
        self._succession.check_integrity(self._members[ROUTER_ID])
        for name, member in self._members.items():
            serves = member.phase in (Phase.READY, Phase.DRAINING)
            assert serves == bool(member.address), f"{name}: address and phase differ"
            if not self._stopping and member.phase not in (Phase.READY, Phase.DYING) and member.attempt:
                assert member.due is not None, f"{name} is {member.phase.value} for ever"
            if self._finished:
                assert member.phase is Phase.ABSENT, f"{name} is {member.phase.value} after the end"
        if self._published is not None and self._members[ROUTER_ID].phase is Phase.READY and not self._stopping:
            serving = {name: member.address for name, member in self._members.items() if member.address}
            del serving[ROUTER_ID]
            assert self._published.addresses == serving, "the router was told of other workers than those that serve"
