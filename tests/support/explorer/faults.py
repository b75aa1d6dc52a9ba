"""What may go wrong in an explored world, as steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from explorer.agenda import Actor
from explorer.links import ReceiverEnd, Sent, decoded
from explorer.model import MODEL_FAULT
from explorer.node import Node
from explorer.world import Step, World
from kv_transfer.frames import Block, Blocks


def faults(world: World) -> list[Step]:
    """Those that may happen now, in an order that does not change."""
    if world.silent:
        return []
    found: list[Step] = []
    if world.num_faults < world.setup.max_faults:
        for kind in world.setup.faults:
            found += FAULTS[kind](world)
    if world.setup.silence:
        found.append(Step("silence", "", partial(_fall_silent, world), ()))
    return found


def _crash(world: World) -> Iterator[Step]:
    for node in world.nodes:
        if node.alive:
            actors = [end.actor for end in world.senders if end.node is node]
            actors += [end.actor for end in world.receivers if end.node is node]
            actors += [c.worker for c in world.connections.values() if c.node is node]
            yield _fault(world, "crash", node.worker_id, partial(_kill, world, node), *actors, *_all(node))


def _kill(world: World, node: Node) -> None:
    node.alive = False
    wires = [end.wire for end in world.senders if end.node is node]
    wires += [end.wire for end in world.receivers if end.node is node]
    for wire in wires:
        if wire is not None:
            wire.over = True
    world.ending[:] = [connection for connection in world.ending if connection.node is not node]


def _freeze(world: World) -> Iterator[Step]:
    for node in world.nodes:
        if node.runs:
            yield _fault(world, "freeze", node.worker_id, partial(setattr, node, "frozen", True), *_all(node))


def _model(world: World) -> Iterator[Step]:
    """The model fails in the next step of the engine."""
    for node in world.nodes:
        if node.runs and node.model.fault is None:
            fault = partial(setattr, node.model, "fault", RuntimeError(MODEL_FAULT))
            yield _fault(world, "model", node.worker_id, fault, node.engine_thread)


def _cancel(world: World) -> Iterator[Step]:
    for client in world.clients:
        if not client.outcome:
            yield _fault(world, "cancel", str(client.number), client.cancel, client.actor)


def _cut(world: World) -> Iterator[Step]:
    for connection in world.connections.values():
        if not connection.cut and connection.router_end.over is None and connection.node.alive:
            cut = partial(setattr, connection, "cut", True)
            yield _fault(world, "cut", connection.name, cut, connection.router, connection.worker)


def _tear(world: World) -> Iterator[Step]:
    """What is on the wire is lost, and both ends will hear of it."""
    for end in world.receivers:
        if not end.wire.torn:
            yield _fault(world, "tear", end.actor.name, end.wire.tear, end.actor, end.peer.actor)


def _flip(world: World) -> Iterator[Step]:
    """One bit of the payload that arrives next."""
    for end in world.receivers:
        sent = _next_block(end)
        if sent is not None and not sent.flipped:
            yield _fault(world, "flip", end.actor.name, partial(setattr, sent, "flipped", True), end.actor)


def _repeat(world: World) -> Iterator[Step]:
    """A frame comes once more: the next one, or the last that came on an earlier link of the same pair."""
    for end in world.receivers:
        if end.over:
            continue
        for stream, name in ((end.wire.down, "down"), (end.wire.up, "up")):
            if stream:
                again = partial(stream.appendleft, stream[0])
                yield _fault(world, "repeat", f"{name} {end.actor.name}", again, end.actor, end.peer.actor)
        late = [old.taken for old in world.receivers if old.over and old.peer.node is end.peer.node and old.taken]
        if late:
            yield _fault(world, "late", end.actor.name, partial(end.wire.down.append, late[-1]), end.actor)


FAULTS: dict[str, Callable[[World], Iterator[Step]]] = {
    "crash": _crash,
    "freeze": _freeze,
    "tear": _tear,
    "cut": _cut,
    "repeat": _repeat,
    "flip": _flip,
    "model": _model,
    "cancel": _cancel,
}


def _next_block(end: ReceiverEnd) -> Sent | None:
    if end.writing is not None and not end.copied:
        return end.taken
    if end.over or not end.wire.down or not isinstance(decoded(end.wire.down[0]), (Block, Blocks)):
        return None
    return end.wire.down[0]


def _fault(world: World, kind: str, name: str, happen: Callable[[], object], *actors: Actor) -> Step:
    def run() -> None:
        world.num_faults += 1
        world.disturbed_at = world.clock.now
        happen()

    return Step(kind, name, run, actors)


def _fall_silent(world: World) -> None:
    world.silent = True


def _all(node: Node) -> tuple[Actor, Actor, Actor]:
    return (node.loop, node.engine_thread, node.links)
