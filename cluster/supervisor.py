"""Keeps a cluster as its spec wants it: carries out what `reconcile` decides, and feeds what happened back as events.

One task lives with each actor, from its start to its death. Nothing here knows Ray: a `Host` runs the actors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cluster.events import (
    ROUTER_ID,
    ActorDied,
    ActorReady,
    AwaitDrained,
    DesiredChanged,
    Event,
    HostLost,
    Instruction,
    KillActor,
    MemberHung,
    MemberMustMove,
    MemberView,
    PoolWanted,
    PublishWorkers,
    RetireRouter,
    StartActor,
    StopActor,
    StopRequested,
    WorkerDrained,
    WorkersConnected,
)
from cluster.host import ActorLost, Handle, Host, ReadyReport
from cluster.reconcile import Reconciler
from cluster.spec import SupervisionSpec
from engine.errors import EngineError, UnavailableError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 15.0
"""For the router to have a session with every worker that it was told of."""
CALL_TIMEOUT_S = 5.0
"""For an actor to answer a call, beyond what the call itself may wait for."""
HEALTH_CHECKS = 2
"""In a row that bring no answer, before a member counts as hung. More than one, because we may have been held up."""
KILL_TIMEOUT_S = 10.0
"""From killing an actor until its death is confirmed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member and, while it serves, what it reported."""

    view: MemberView
    report: ReadyReport | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    ready: bool
    """Every member serves and the router has a session with every worker."""
    members: tuple[Member, ...]
    """The router first."""
    settled: bool = False
    """Nothing is on its way to what was wanted last, and nothing is wrong."""
    trouble: str = ""
    """Workers that the router cannot use, and why."""
    desired: DesiredChanged | None = None
    """What was last asked for, since the start."""

    @property
    def router_address(self) -> str:
        """Empty while it does not serve."""
        return self.members[0].view.address

    @property
    def http_address(self) -> str:
        """Of the router; empty while it does not serve."""
        report = self.members[0].report
        return "" if report is None else report.http_address


@dataclass(slots=True)
class _Life:
    """One actor's time on earth."""

    member_id: str
    attempt: int
    handle: Handle
    report: ReadyReport | None = None
    ending: bool = False
    """Its end is wanted."""
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """Owns the actors of one cluster, through `host`, and the tasks that live with them. On one event loop."""

    def __init__(
        self,
        host: Host,
        pools: Mapping[str, PoolWanted],
        limits: SupervisionSpec,
        on_change: Callable[[Snapshot], None],
        now: Callable[[], float] = time.monotonic,
        *,
        router: Hashable = None,
    ) -> None:
        """`pools` by role; `router`: its revision. `on_change` is called on the event loop whenever something about a
        member changed."""
        self._host = host
        self._limits = limits
        self._on_change = on_change
        self._now = now
        self._reconciler = Reconciler(pools, limits, router)
        self._events: asyncio.Queue[Event] = asyncio.Queue()  # an actor's life puts in three at most
        self._lives: dict[tuple[str, int], _Life] = {}
        """By member and attempt; each until the reconciler knows that its actor is dead."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing: asyncio.Task[None] | None = None
        self._trouble = ""
        self._desired: DesiredChanged | None = None
        self._was_ready = False

    async def run(self) -> None:
        """Bring the cluster up and keep it up until `request_stop`, then take it down in order.

        Raises `UnavailableError` with the reason if the cluster failed. However it ends, no task is left; actors may be
        left only if the host was lost or this was cancelled.
        """
        self._spawn(self._watch_host())
        self._spawn(self._watch_nodes())
        error: str | None = None
        try:
            self._carry_out(self._reconciler.start(self._now()))
            self._tell()
            while not self._reconciler.finished:
                event = await self._next_event()
                now = self._now()
                if isinstance(event, DesiredChanged):
                    self._desired = event
                instructions = self._reconciler.tick(now) if event is None else self._reconciler.handle(event, now)
                error = self._carry_out(instructions) or error
                if isinstance(event, ActorDied):
                    self._lives.pop((event.member_id, event.attempt), None)
                self._tell()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
        if error is not None:
            raise UnavailableError(error)

    def request_stop(self, error: str | None = None) -> None:
        """Take the cluster down in order; `error` makes it a failure. Idempotent."""
        self._events.put_nowait(StopRequested(error))

    def change(self, desired: DesiredChanged) -> None:
        """From now on keep the cluster so. Snapshots tell how far it is."""
        self._limits = desired.limits
        self._events.put_nowait(desired)

    def give_up(self, reason: str) -> None:
        """End `run` at once, whatever still lives."""
        self._events.put_nowait(HostLost(reason))

    async def _next_event(self) -> Event | None:
        """None: something became due."""
        due = self._reconciler.next_due
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - self._now())):
                return await self._events.get()
        except TimeoutError:
            return None

    def _carry_out(self, instructions: Sequence[Instruction]) -> str | None:
        """Returns the error of a `Finish`."""
        for instruction in instructions:
            match instruction:
                case StartActor():
                    self._start(instruction)
                case StopActor(member_id, attempt):
                    self._spawn(self._end_gently(self._lives[member_id, attempt]))
                case RetireRouter(member_id, attempt):
                    self._spawn(self._retire(self._lives[member_id, attempt]))
                case KillActor(member_id, attempt, reason):
                    logger.info("%s is killed: %s", member_id, reason)
                    self._spawn(self._kill(self._lives[member_id, attempt], force=True))
                case PublishWorkers():
                    self._start_publishing(instruction)
                case AwaitDrained(member_id, attempt):
                    self._spawn(self._await_drained(self._router, member_id, attempt))
                case _:
                    return instruction.error
        return None

    @property
    def _router(self) -> _Life:
        """The one that serves."""
        return self._lives[ROUTER_ID, self._reconciler.views()[0].attempt]

    def _start(self, wanted: StartActor) -> None:
        member_id, attempt = wanted.member_id, wanted.attempt
        try:
            handle = self._host.start(member_id, wanted.role, wanted.takes_over)
        except ActorLost as error:
            self._events.put_nowait(ActorDied(member_id, attempt, str(error)))
            return
        life = self._lives[member_id, attempt] = _Life(member_id, attempt, handle)
        self._spawn(self._live(life))

    async def _live(self, life: _Life) -> None:
        member_id, attempt = life.member_id, life.attempt
        hopeless = False
        try:
            life.report = await life.handle.ready()
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in life.report.timings.items())
            logger.info("%s serves at %s (start %d) %s", member_id, life.report.address, attempt, parts)
            self._events.put_nowait(ActorReady(member_id, attempt, life.report.address))
            reason = await self._until_gone(life)
        except ActorLost as error:
            reason = str(error)
        except EngineError as error:
            reason, hopeless = str(error), not error.retryable
        life.handle.kill(force=False)  # an actor that could not serve is a process still
        life.report = None
        life.over.set()
        if life.ending:  # what Ray tells of an end that we asked for sounds like an accident
            reason = "stopped"
        logger.info("%s ended: %s", member_id, reason)  # who starts it tells the user, if it was an accident
        self._events.put_nowait(ActorDied(member_id, attempt, reason, hopeless))

    async def _until_gone(self, life: _Life) -> str:
        """Returns why it is gone. Says so, once, if it hangs before: the death then comes from being killed."""
        limit_s = self._limits.hung_after_s
        silent = 0
        gone = asyncio.create_task(life.handle.gone())
        try:
            while silent < HEALTH_CHECKS:
                # The wait for its end is also the pause between two checks; without an answer there is none.
                done, _ = await asyncio.wait({gone}, timeout=0 if silent else limit_s / 3)
                if done or life.ending:
                    return await gone
                silent = 0 if await self._answers(life, gone, limit_s / HEALTH_CHECKS) else silent + 1
                if gone.done():
                    return await gone
            self._events.put_nowait(MemberHung(life.member_id, life.attempt, f"no answer for {limit_s:g} s"))
            return await gone
        finally:
            if not gone.done():
                gone.cancel()
                await asyncio.wait({gone})

    async def _answers(self, life: _Life, gone: asyncio.Task[str], timeout_s: float) -> bool:
        """Whether it answers within `timeout_s`; not waited for once it is gone."""
        asking = asyncio.create_task(life.handle.answers(timeout_s))
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            return asking.done() and asking.result()
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait({asking})

    async def _end_gently(self, life: _Life) -> None:
        await self._end(life, life.handle.stop(), self._limits.drain_s)

    async def _retire(self, router: _Life) -> None:
        drain_s = self._limits.worker_drain_s
        await self._end(router, router.handle.retire(drain_s), drain_s)

    async def _end(self, life: _Life, stop: Awaitable[None], drain_s: float) -> None:
        life.ending = True
        try:
            async with asyncio.timeout(drain_s + self._limits.stop_timeout_s):
                await stop
        except TimeoutError:
            logger.warning("%s did not stop within %g s", life.member_id, self._limits.stop_timeout_s)
        except ActorLost as error:
            logger.info("%s ended before it stopped: %s", life.member_id, error)
        await self._kill(life, force=False)

    async def _kill(self, life: _Life, *, force: bool) -> None:
        life.ending = True
        for harder in (True,) if force else (False, True):
            life.handle.kill(force=harder)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await life.over.wait()
                    return
        reason = f"killed; its end was not confirmed within {KILL_TIMEOUT_S:g} s"
        self._events.put_nowait(ActorDied(life.member_id, life.attempt, reason))

    def _start_publishing(self, told: PublishWorkers) -> None:
        # Only the newest list matters. The router gets them in the order in which they were sent.
        if self._publishing is not None:
            self._publishing.cancel()
        self._publishing = self._spawn(self._publish(self._router, told))

    async def _publish(self, router: _Life, told: PublishWorkers) -> None:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S + CALL_TIMEOUT_S):
                missing = await router.handle.set_workers(told.addresses, told.draining, CONNECT_TIMEOUT_S)
        except ActorLost:
            return  # its life says so too
        except TimeoutError:
            missing = "the router does not answer"
            router.handle.kill(force=True)
        self._trouble = missing
        if not missing:
            self._events.put_nowait(WorkersConnected(told))
        elif self._was_ready:
            logger.warning("the router is not connected to every worker: %s", missing)
            self._tell()
        else:
            self.request_stop(f"the router cannot use its workers: {missing}")

    async def _await_drained(self, router: _Life, worker_id: str, attempt: int) -> None:
        limit_s = self._limits.worker_drain_s
        try:
            async with asyncio.timeout(limit_s + CALL_TIMEOUT_S):
                await router.handle.drained(worker_id, limit_s)
        except TimeoutError:
            logger.warning("the router does not say whether %s is drained", worker_id)
        except ActorLost:
            logger.info("%s has lost its requests with the router", worker_id)
        self._events.put_nowait(WorkerDrained(worker_id, attempt))

    async def _watch_nodes(self) -> None:
        leaving: frozenset[str] = frozenset()
        while True:
            leaving = await self._host.leaving(leaving)
            for life in self._lives.values():
                self._move_if(life, leaving)

    def _move_if(self, life: _Life, leaving: frozenset[str]) -> None:
        if life.report is not None and life.report.node_id in leaving:
            logger.info("%s moves: its node goes away", life.member_id)
            self._events.put_nowait(MemberMustMove(life.member_id, life.attempt))

    async def _watch_host(self) -> None:
        self._events.put_nowait(HostLost(await self._host.lost()))

    def _tell(self) -> None:
        ready = self._reconciler.all_ready
        self._was_ready = self._was_ready or ready
        members = []
        for view in self._reconciler.views():
            life = self._lives.get((view.member_id, view.attempt))
            report = life.report if life is not None and view.address else None
            members.append(Member(view, report))
        self._on_change(Snapshot(ready, tuple(members), self._reconciler.settled, self._trouble, self._desired))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours must not leave a cluster that nobody watches.
            logger.error("a task of the supervisor failed", exc_info=error)
            self.give_up(f"{type(error).__name__}: {error}")
