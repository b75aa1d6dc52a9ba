"""What can be asked of a running cluster: another spec, another size, a worker less, a worker in the other role.

An order is answered when the cluster is as it was ordered, or when the time of the order is up; what was begun then
goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from cluster.changes import Changes, compare, desired
from cluster.events import ROUTER_ID, DesiredChanged, Phase
from cluster.quoting import quoted
from cluster.spec import DECODE, PREFILL, ROLES, ClusterSpec
from cluster.spec_file import parse_spec
from cluster.supervisor import Snapshot
from engine.errors import ConfigError, DeadlineExceeded, UnavailableError

logger = logging.getLogger(__name__)

CATCH_UP_S = 5.0
"""For the supervisor to take an order over."""

Tell = Callable[[Mapping[str, Any]], Awaitable[None]]
Order = Mapping[str, Any]


class Supervised(Protocol):
    """What carries a change out."""

    def change(self, desired: DesiredChanged) -> None: ...


class Operations:
    """Owns the spec of the running cluster. On the supervisor's event loop.

    `check` raises `ConfigError` for a spec that cannot run here; `use` makes it that of workers to be started.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        supervisor: Supervised,
        check: Callable[[ClusterSpec], None],
        use: Callable[[ClusterSpec], None],
    ) -> None:
        self.spec = spec
        self._supervisor = supervisor
        self._check = check
        self._use = use
        self._snapshot: Snapshot | None = None
        self._changed = asyncio.Event()
        self._last: DesiredChanged | None = None
        """What was ordered last."""
        self._router_restarts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        """Flips that are under way."""

    def changed(self, snapshot: Snapshot) -> None:
        """From the supervisor."""
        self._snapshot = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def carry_out(self, order: Order, tell: Tell) -> dict[str, Any]:
        """Orders: `apply` (spec, dry_run), `scale` (replicas), `drain` and `flip` (worker), `restart` (of the router),
        `show`. With `wait_s`, all but `show` wait so long until it is done; `tell` gets each member's phase meanwhile.

        Raises `ConfigError` for an order that makes no sense, and then nothing was changed; `DeadlineExceeded` when the
        time is up and it still goes on; `UnavailableError` when another order came before this one was done.
        """
        name, wait_s = order.get("order"), float(order.get("wait_s", 0.0))
        if name != "show":
            await self._caught_up()
        match name:
            case "show":
                return self._show()
            case "apply":
                wanted = parse_spec(str(order["spec"]), "the spec")
                changes = compare(self.spec, wanted)
                if order.get("dry_run"):
                    return _account(changes)
            case "scale":
                wanted = self._scaled(dict(order["replicas"]))
            case "drain":
                wanted = self._without(str(order["worker"]))
            case "flip":
                return await self._flip(str(order["worker"]), wait_s, tell)
            case "restart":
                self._router_restarts += 1
                done = await self._change(self.spec, "", wait_s, tell)
                return {**done, "changed": True, "lines": ["router: another one takes over"]}
            case _:
                raise ConfigError(f"order: unknown: {quoted(str(name))}")
        return await self._change(wanted, str(order.get("worker", "")), wait_s, tell)

    async def _change(self, wanted: ClusterSpec, take_away: str, wait_s: float, tell: Tell) -> dict[str, Any]:
        changes = compare(self.spec, wanted)
        changes.check()
        self._check(wanted)
        self._use(wanted)
        self.spec = wanted
        change = self._last = desired(wanted, take_away, self._router_restarts)
        self._supervisor.change(change)
        if wait_s > 0:
            await self._until_settled(change, wait_s, tell)
        return _account(changes)

    async def _caught_up(self) -> None:
        """Until the snapshot is of after the last order: nothing is decided by how it was before. In no time, while the
        supervisor runs."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while self._last is not None and (self._snapshot is None or self._snapshot.desired != self._last):
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError("the cluster has not taken the order before this one yet; try again") from None

    async def _until_settled(self, change: DesiredChanged, wait_s: float, tell: Tell) -> None:
        """The same order given twice is done when it is done."""
        told: dict[str, Any] = {}
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    snapshot, changed = self._snapshot, self._changed
                    if self._last != change:
                        raise UnavailableError("another order came before this one was done")
                    if snapshot is not None and snapshot.desired == change:
                        if told != (told := {"members": _phases(snapshot)}):
                            await tell(told)
                        if snapshot.settled:
                            return
                    await changed.wait()
        except TimeoutError:
            raise self._too_late(wait_s) from None

    def _too_late(self, wait_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"not done after {wait_s:g} s, and it goes on: {self._trouble()}")

    async def _flip(self, worker: str, wait_s: float, tell: Tell) -> dict[str, Any]:
        """First the one is gone, then the other is started: both at once may not fit.

        Another order in between is told in the error: then the other was not started.
        """
        role = self._role_of(worker)
        other = PREFILL if role == DECODE else DECODE
        fewer = self._without(worker)
        more = _resized(fewer, {other: fewer.pool(other).replicas + 1})
        changes = compare(self.spec, more)
        changes.check()
        self._check(more)
        flipping = asyncio.create_task(self._carry_over(fewer, worker, other, tell), name=f"flip of {worker}")
        self._tasks.add(flipping)
        flipping.add_done_callback(self._done)
        if wait_s > 0:
            done, _ = await asyncio.wait({flipping}, timeout=wait_s)
            if not done:
                raise self._too_late(wait_s)
            flipping.result()
        return _account(changes)

    async def _carry_over(self, fewer: ClusterSpec, worker: str, other: str, tell: Tell) -> None:
        """To its end, also if nobody waits for it any more."""
        patience_s = self._patience_s()
        try:
            await self._change(fewer, worker, patience_s, tell)
        except (UnavailableError, DeadlineExceeded) as error:
            raise type(error)(f"{worker} is taken away, and no {other} worker was started: {error}") from None
        await self._change(_resized(self.spec, {other: self.spec.pool(other).replicas + 1}), "", patience_s, tell)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s: %s", task.get_name(), error)

    async def close(self) -> None:
        """End what is still to be ordered. Nothing of it is left."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _patience_s(self) -> float:
        limits = self.spec.supervision
        return limits.worker_drain_s + limits.drain_s + limits.stop_timeout_s + limits.start_timeout_s

    def _scaled(self, replicas: Mapping[str, Any]) -> ClusterSpec:
        for role, count in replicas.items():
            if type(count) is not int:  # `is`: true must not pass for 1
                raise ConfigError(f"{quoted(str(role))}: replicas must be an integer, got {quoted(str(count))}")
            if role not in ROLES:
                raise ConfigError(f"{quoted(role)} is no pool; pools are {' and '.join(ROLES)}")
        return _resized(self.spec, replicas)

    def _without(self, worker: str) -> ClusterSpec:
        role = self._role_of(worker)
        left = self.spec.pool(role).replicas - 1
        if role == DECODE and left < 1:
            raise ConfigError(
                f"{worker} is the only decode worker, and every request ends on one; `kvrelay scale decode=2` first"
            )
        return _resized(self.spec, {role: left})

    def _role_of(self, worker: str) -> str:
        views = [] if self._snapshot is None else [member.view for member in self._snapshot.members]
        workers = {view.member_id: view for view in views if view.role != ROUTER_ID}
        if worker not in workers:
            raise ConfigError(f"worker {quoted(worker)} is not there; there are {', '.join(workers)}")
        if workers[worker].phase in (Phase.DRAINING, Phase.DYING):
            raise ConfigError(f"worker {worker} is {workers[worker].phase.value} already")
        return workers[worker].role

    def _show(self) -> dict[str, Any]:
        phases = {} if self._snapshot is None else _phases(self._snapshot)
        settled = self._snapshot is not None and self._snapshot.settled
        return {"spec": asdict(self.spec), "members": phases, "settled": settled, "trouble": self._trouble()}

    def _trouble(self) -> str:
        """What keeps the cluster from being as it is wanted."""
        if self._snapshot is None:
            return "it is still starting"
        reasons = [
            f"{member.view.member_id} is {member.view.phase.value}"
            + (f" ({member.view.last_reason})" if member.view.last_reason and member.view.starts_again else "")
            for member in self._snapshot.members
            if member.report is None or member.view.phase is not Phase.READY
        ]
        return "; ".join([*reasons, *filter(None, [self._snapshot.trouble])])


def _resized(spec: ClusterSpec, replicas: Mapping[str, int]) -> ClusterSpec:
    pools = {}
    for role, count in replicas.items():
        try:
            pools[role] = replace(spec.pool(role), replicas=count)
        except ConfigError as error:
            raise ConfigError(f"{role}: {error}") from None
    return replace(spec, pools=replace(spec.pools, **pools))


def _account(changes: Changes) -> dict[str, Any]:
    return {"changed": changes.any, "lines": list(changes.lines()), **asdict(changes)}


def _phases(snapshot: Snapshot) -> dict[str, str]:
    told = {}
    for member in snapshot.members:
        view = member.view
        told[view.member_id] = f"starts again: {view.last_reason}" if view.starts_again else view.phase.value
    return told
