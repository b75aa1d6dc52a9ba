"""The explored world: workers, links, a router with its requests, and what can happen next.

One *step* is what one thread does until others may come in between, one message or frame that arrives, the next point
in time, or a fault. `steps` lists those that are possible, always in the same order; whoever explores chooses by its
place in that list, so a list of numbers is a schedule.

Each step makes its actors' `past` a digest of what they and what they took in had gone through. Two schedules that
differ only in the order of steps of different actors end with equal pasts: `fingerprint` tells that it is the same
state, without looking into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import grpc

from engine.block_hash import unpack_tokens
from engine.errors import EngineError, WorkerLost
from explorer.agenda import Actor, Clock
from explorer.checks import Violation, check_node, check_rest, contents_of
from explorer.client import Client
from explorer.links import ReceiverEnd, SenderEnd
from explorer.model import expected_output
from explorer.node import LEASE_S, Connection, Node, run
from kv_transfer.frames import PROTOCOL_VERSION
from kv_transfer.identity import MAPPING, TCP
from kvrelay.v1 import worker_pb2
from router.session import WorkerSession


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a world begins with, and what may happen to it."""

    requests: tuple[tuple[tuple[int, ...], int], ...]
    """Prompt and max_tokens of each."""
    num_prefill: int = 1
    num_decode: int = 1
    num_blocks: int = 3
    prefill_budget: int = 2
    """Tokens a step."""
    transport: str = TCP
    protocol: int = PROTOCOL_VERSION
    """Of the prefill workers."""
    faults: tuple[str, ...] = ()
    max_faults: int = 0
    silence: bool = False
    """Router and links may fall silent for ever: then only deadlines are left."""


class Step(NamedTuple):
    kind: str
    name: str
    """Of its subject."""
    run: Callable[[], None]
    actors: tuple[Actor, ...]
    """None named: all of them."""
    origins: tuple[int, ...] = ()
    """Of what it takes in."""
    node: Node | None = None
    """Whose invariants it may break."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class World:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = Clock()
        self.numbers = count()
        self.nodes: list[Node] = []
        self.senders: list[SenderEnd] = []
        self.receivers: list[ReceiverEnd] = []
        self.connections: dict[str, Connection] = {}
        """The router's newest to each worker."""
        self.ending: list[Connection] = []
        """That the router has given up, and whose worker does not know yet."""
        self.fleet_changes = 0
        self.silent = False
        self.contents: dict[bytes, tuple[int, ...]] = {}
        self.num_faults = 0
        self.disturbed_at = 0.0
        """When time last passed although something else was to be done, or a fault happened or ended."""
        self.patience_s = 2 * LEASE_S * len(setup.requests)
        """From then on, all requests end and nothing is left within this time. One may have to wait for the others."""
        self.trace: list[str] = []
        """The steps that were taken."""
        self._step = 0
        self._fleet = Actor("fleet")
        for role, number in (("p", setup.num_prefill), ("d", setup.num_decode)):
            for i in range(number):
                self.start(f"{role}{i}")
        self.clients = [Client(self, i, *request) for i, request in enumerate(setup.requests)]
        for prompt, max_tokens in setup.requests:
            self.contents.update(contents_of(list(prompt), expected_output(prompt, max_tokens)))

    # What actors ask of it.

    def origin(self) -> int:
        """Digest of the step that is being taken, and of all that led to it."""
        return self._step

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise Violation(message)

    def ready(self, role: str) -> list[str]:
        """Names of the workers of a role that the router has a session with."""
        return [name for name, c in self.connections.items() if name[0] == role and c.router_end.over is None]

    def session(self, worker_id: str) -> WorkerSession:
        return self.connections[worker_id].router_end

    def node(self, worker_id: str) -> Node:
        """Its newest incarnation."""
        return next(node for node in reversed(self.nodes) if node.worker_id == worker_id)

    def computes(self, node: Node, block: int) -> None:
        """The engine of `node` is about to write a block."""
        busy = [slot for slot, _ in node.being_written()]
        self.require(block not in busy, f"{node.worker_id} computes into slot {block}, which a link is writing")

    # What can happen.

    def steps(self) -> list[Step]:
        """Faults come last. Empty: the world has come to rest, or nothing is left but faults and it is silent."""
        found = [step for node in self.nodes if node.runs for step in self._of_node(node)]
        found += [step for end in self.senders if not end.over and end.node.runs for step in self._of_sender(end)]
        found += [step for end in self.receivers if not end.over and end.node.runs for step in self._of_receiver(end)]
        for connection in [*self.connections.values(), *self.ending]:
            found += self._of_connection(connection)
        if not self.silent:
            for client in self.clients:
                if client.has_step:
                    actors = (client.actor, self._fleet) if client.placing else (client.actor,)
                    found.append(Step("request", str(client.number), client.step, actors, tuple(client.origins)))
        for node in self.nodes:
            if node.frozen and node.alive:
                found.append(Step("thaw", node.worker_id, partial(self._thaw, node), (node.loop,)))
            if not node.alive and self.node(node.worker_id) is node:
                found.append(Step("restart", node.worker_id, partial(self.start, node.worker_id), (self._fleet,)))
        later = self._next_time()
        if later is not None:
            found.append(Step("time", f"{later:g}", partial(self._advance, later, idle=not found), ()))
        return found

    def take(self, step: Step) -> None:
        """Raises `Violation`, or whatever a fault of the code raises."""
        self.trace.append(str(step))
        actors = step.actors or tuple(self.actors())
        self._step = hash((step.kind, step.name, tuple(actor.past for actor in actors), step.origins))
        for actor in actors:
            actor.past = self._step
        step.run()
        if step.node is not None and step.node.alive:
            check_node(step.node, engine=step.kind == "engine")

    def fingerprint(self) -> int:
        queues: list[object] = [self.num_faults, self.clock.now]
        for node in self.nodes:
            queues.append(tuple(entry[0] for entry in node.agenda.notifications))
            queues.append(tuple(entry[0] for entry in node.agenda.commands))
        queues += [tuple(connection.router_end.origins) for connection in self.connections.values()]
        queues += [tuple(client.origins) for client in self.clients]
        return hash((tuple(actor.past for actor in self.actors()), tuple(queues)))

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def actors(self) -> Iterator[Actor]:
        for node in self.nodes:
            yield from (node.loop, node.engine_thread, node.links)
        yield from (end.actor for end in self.senders)
        yield from (end.actor for end in self.receivers)
        for connection in (*self.connections.values(), *self.ending):
            yield from (connection.router, connection.worker)
        for client in self.clients:
            yield client.actor
        yield self._fleet

    def start(self, worker_id: str) -> None:
        """A new incarnation."""
        budget = self.setup.prefill_budget if worker_id[0] == "p" else 4
        self.nodes.append(Node(self, worker_id, self.setup.num_blocks, budget))
        self.disturbed_at = self.clock.now
        self._dial(worker_id)

    def _dial(self, worker_id: str) -> None:
        """The router connects, if it is without a session and there is somebody."""
        old, node = self.connections.get(worker_id), self.node(worker_id)
        if not node.alive or (old is not None and old.router_end.over is None):
            return
        if old is not None and not old.worker_knows and old.node.alive:
            self.ending.append(old)
        self.connections[worker_id] = Connection(self, node)
        self.fleet_changes += 1

    def _of_node(self, node: Node) -> Iterator[Step]:
        agenda, shared = node.agenda, (node.loop, node.links)
        if agenda.notifications:
            first = agenda.notifications[0][0]
            yield Step("notice", node.worker_id, partial(_notice, node), shared, (first,), node)
        timer = agenda.next_timer()
        if timer is not None and timer.when <= self.clock.now:
            yield Step("timer", node.worker_id, timer.fire, shared, (), node)
        if agenda.commands or node.engine.has_work():
            origins = tuple(entry[0] for entry in agenda.commands)
            actors = (node.engine_thread,) if node.decodes else (node.engine_thread, node.links)
            yield Step("engine", node.worker_id, node.turn, actors, origins, node)

    def _of_sender(self, end: SenderEnd) -> Iterator[Step]:
        actors = (end.actor, end.node.links)
        if end.wire is None:
            to = self.node(end.decode_worker)
            if (to.runs or not to.alive) and not self.silent:
                there = to if to.alive else None
                yield Step("connect", end.actor.name, partial(end.connect, there), (*actors, to.loop), (), end.node)
            elif end.connect_by <= self.clock.now:
                yield Step("connect", end.actor.name, partial(end.connect, None), actors, (), end.node)
            return
        if end.has_step:
            yield Step("write", end.actor.name, end.write, actors, (), end.node)
        if not end.ending and (end.wire.up or end.wire.over) and not self.silent:
            origins = (end.wire.up[0].origin,) if end.wire.up else ()
            yield Step("read", end.actor.name, end.read, actors, origins, end.node)

    def _of_receiver(self, end: ReceiverEnd) -> Iterator[Step]:
        node = end.node
        actors: tuple[Actor, ...] = (end.actor, node.links)
        down = end.wire.down
        if end.writing is None:
            if (down or end.wire.over) and not self.silent:
                origins = (down[0].origin, len(down) > 1) if down else ()
                yield Step("frame", end.actor.name, end.receive, actors, origins, node)
        elif not end.copied:
            if self.setup.transport in MAPPING:
                actors = (*actors, end.peer.node.engine_thread)
            yield Step("copy", end.actor.name, end.copy, actors, (), node)
        else:
            yield Step("finish", end.actor.name, end.finish, actors, (bool(down),), node)

    def _of_connection(self, connection: Connection) -> Iterator[Step]:
        node, name, router_end = connection.node, connection.name, connection.router_end
        if node.runs and not connection.worker_knows:
            actors = (connection.worker, node.loop, node.links)
            if router_end.outbox_size and not self.silent:
                yield Step("hear", name, partial(self._hear, connection), actors, (router_end.origins[0],), node)
            if connection.cut or router_end.over is not None:
                yield Step("gone", name, partial(self._gone, connection), actors, (), node)
        if router_end.over is None and not self.silent:
            if connection.waiting:
                yield Step("reply", name, partial(self._reply, connection), (connection.router,))
            if connection.cut or not node.alive:
                clients = [client.actor for client in self.clients]
                yield Step("lost", name, partial(self._lost, connection), (connection.router, self._fleet, *clients))

    def _hear(self, connection: Connection) -> None:
        """The worker gets a message of the router; what `WorkerServer` does with it."""
        message = connection.router_end.take()
        if message.HasField("reserve"):
            connection.lanes[message.reserve.lane] = message.reserve.request_id
        try:
            run(connection.node.role.handle(connection.worker_end, message))
        except EngineError as error:
            request_id = getattr(message, message.WhichOneof("message") or "").request_id
            connection.worker_end.send_ended(request_id, error)

    def _gone(self, connection: Connection) -> None:
        connection.worker_knows = True
        connection.worker_end.close(grpc.StatusCode.CANCELLED, "the stream ended")
        connection.node.role.session_ended(connection.worker_end)
        if connection in self.ending:
            self.ending.remove(connection)

    def _reply(self, connection: Connection) -> None:
        message = connection.waiting.popleft()
        for request_id in _requests_of(message, connection.lanes):
            name = f"{request_id} on {connection.name}"
            self.require(request_id not in connection.ended, f"{name}: a message after Ended")
        if message.WhichOneof("message") == "ended":
            connection.ended.add(message.ended.request_id)
        connection.router_end.deliver(message)

    def _lost(self, connection: Connection) -> None:
        connection.router_end.end(WorkerLost("the session ended"))
        self.fleet_changes += 1
        self._dial(connection.node.worker_id)

    def _thaw(self, node: Node) -> None:
        node.frozen = False
        self.disturbed_at = self.clock.now

    def _next_time(self) -> float | None:
        """The next point in time for which anybody has armed something."""
        times = [timer.when for node in self.nodes if node.runs for timer in node.agenda.timers]
        times += [end.deadline for end in self.senders if not end.over and end.node.runs and end.deadline is not None]
        if not self.silent:
            times += [client.deadline for client in self.clients if not client.outcome]
        return min((time for time in times if time > self.clock.now), default=None)

    def _advance(self, time: float, *, idle: bool) -> None:
        """`idle`: nothing else could happen."""
        if not idle:
            self.disturbed_at = time
        elif time > self.disturbed_at + self.patience_s and not self.silent:
            check_rest(self)
        self.clock.now = time


def _notice(node: Node) -> None:
    _, callback, args = node.agenda.notifications.popleft()
    callback(*args)


def _requests_of(message: worker_pb2.SessionResponse, lanes: Mapping[int, str]) -> list[str]:
    if message.WhichOneof("message") == "step":
        step = message.step
        return [lanes[number] for number in unpack_tokens(step.columns.lanes)] + [e.request_id for e in step.outputs]
    return [getattr(message, message.WhichOneof("message") or "").request_id]
