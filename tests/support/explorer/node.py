"""One worker of the explored world: a real role on an agenda, around a real engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from unittest import mock

from decode_worker.worker import DecodeWorker
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.kv_cache import KvCache
from engine.plan import pool_of
from explorer.agenda import Actor, Agenda
from explorer.checks import IDENTITY
from explorer.links import ExploredReceiver, ExploredSender, SenderEnd
from explorer.model import BLOCK_SIZE, LAYOUT, MAX_MODEL_LEN, TinyModel
from kv_transfer.identity import ADOPT
from kvrelay.v1 import worker_pb2
from prefill_worker.worker import PrefillWorker
from router.peer import Peer
from router.session import WorkerSession
from worker.config import WorkerConfig
from worker.engine_builder import EngineParts
from worker.session import Session

if TYPE_CHECKING:
    from explorer.world import World

T = TypeVar("T")
LEASE_S = 5.0
_MAX_OUTBOX = 1024


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Of one that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError(f"{coroutine} waits")


@contextmanager
def virtual() -> Iterator[None]:
    """Sender, receiver and names that are the explorer's. Within an event loop, which never gets a turn."""
    pools: list[KvCache] = []
    with (
        mock.patch("kv_transfer.sender.SenderLink", SenderEnd),
        mock.patch("worker.load.psutil", SimpleNamespace(Process=lambda: None)),
        mock.patch.object(Node, "pools", pools),
    ):
        yield
    for kv in pools:
        kv.close()


class Node:
    """One incarnation. `role` and all behind it run only in the steps of the world."""

    pools: ClassVar[list[KvCache]] = []
    """Of worlds that are over: to make one costs more than all else here."""

    def __init__(self, world: World, worker_id: str, num_blocks: int, budget: int) -> None:
        self.world = world
        self.worker_id = worker_id
        self.decodes = worker_id.startswith("d")
        self.agenda = Agenda(world.clock, world.origin)
        self.loop, self.engine_thread = Actor(f"{worker_id}.loop"), Actor(f"{worker_id}.engine")
        self.links = Actor(f"{worker_id}.links")
        """What the event loop and the link threads share."""
        self.frozen = False
        self.alive = True
        self.model = TinyModel(self._writes)
        self.kv = self._pool(num_blocks)
        cache = CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        scheduler = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=budget)
        self.engine = Engine(
            self.model, self.kv, cache, scheduler, IDENTITY, MAX_MODEL_LEN, clock=lambda: world.clock.now
        )
        self.blocks = self.engine._blocks
        self.role = self._build(num_blocks)
        run(self.role.start())

    def _pool(self, num_blocks: int) -> KvCache:
        adopts = self.world.setup.transport == ADOPT
        borrows, lends = adopts and self.decodes, adopts and not self.decodes
        fitting = next((kv for kv in self.pools if (kv.num_blocks, kv.lends) == (num_blocks, lends)), None)
        if borrows or fitting is None:
            return KvCache(LAYOUT, num_blocks, borrows=borrows, lent_share=0.7 if lends else 0.0)
        self.pools.remove(fitting)
        fitting.pool.fill_(7.0)
        return fitting

    def _build(self, num_blocks: int) -> DecodeWorker | PrefillWorker:
        parts = EngineParts(
            engine=self.engine,
            kv=self.kv,
            pool=pool_of(LAYOUT, 0, num_blocks),
            identity=IDENTITY,
            max_model_len=MAX_MODEL_LEN,
            max_requests=16,
            timings={},
            native=None,
            kernels="",
            device="cpu",
        )
        config = WorkerConfig(worker_id=self.worker_id, model_name="m", engine=_ENGINE_CONFIG, lease_s=LEASE_S)
        with (
            mock.patch("worker.core.uuid.uuid4", return_value=SimpleNamespace(hex=self._name())),
            mock.patch("prefill_worker.worker.KvSender", self._make_sender),
            mock.patch("decode_worker.worker.KvReceiver", self._make_receiver),
        ):
            role = (DecodeWorker if self.decodes else PrefillWorker)(config, parts, self.agenda)
        setattr(role._core.live, "new_key", self._name)  # noqa: B010  # the type checker would object
        return role

    def _name(self) -> str:
        """Never used before in this world, and the same whenever the schedule is played."""
        return f"{self.worker_id}-{next(self.world.numbers)}"

    def _make_sender(self, identity: Any, kv: Any, listener: Any, **_: Any) -> ExploredSender:
        self.sender = ExploredSender(self.world, self, identity, kv, listener)
        return self.sender

    def _make_receiver(
        self, identity: Any, kv: Any, table: Any, listener: Any, host: str, **_: Any
    ) -> ExploredReceiver:
        self.receiver = ExploredReceiver(self.world, identity, kv, table, listener)
        self.table = table
        return self.receiver

    def _writes(self, block: int) -> None:
        self.world.computes(self, block)

    def being_written(self) -> list[tuple[int, int]]:
        """(slot, generation) of all that the links of this decode worker have a grant for."""
        return [place for end in self.world.receivers if end.node is self for place in end.slots]

    @property
    def incarnation(self) -> str:
        return self.role._core.incarnation

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def turn(self) -> None:
        """What the engine thread does between two looks at its list."""
        commands = list(self.agenda.commands)
        self.agenda.commands.clear()
        for _, command in commands:
            command(self.engine)
        if self.engine.has_work():
            output = self.engine.step()
            if output.updates:
                self.role._core._on_output(output)

    def close(self) -> None:
        if self.decodes:
            self.receiver.stop()
        if self.kv.windows is None:
            self.pools.append(self.kv)
        else:
            self.kv.close()


class Connection:
    """One session of the router with one incarnation of a worker: both ends, and the stream between them."""

    def __init__(self, world: World, node: Node) -> None:
        self.node = node
        self.name = f"{node.worker_id}.session{next(world.numbers)}"
        self.router, self.worker = Actor(f"{self.name}.router"), Actor(f"{self.name}.worker")
        self.router_end = RouterEnd(world, node)
        self.worker_end = Session("router", _MAX_OUTBOX)
        self.waiting = self.worker_end._outbox
        """What the worker has said and the router has not heard."""
        self.cut = False
        """It ends at both ends, but neither needs to know yet."""
        self.worker_knows = False
        self.lanes: dict[int, str] = {}
        """What the router calls each request that it has reserved."""
        self.ended: set[str] = set()
        """Requests of which the router heard Ended."""


class RouterEnd(WorkerSession):
    """Keeps what made each message beside it."""

    def __init__(self, world: World, node: Node) -> None:
        peer = Peer.from_welcome(node.role.welcome(), "address")
        super().__init__(peer, _MAX_OUTBOX, lambda: world.require(False, f"{node.worker_id} does not read"))
        self.origins: deque[int] = deque()
        self._world = world

    def send(self, message: worker_pb2.SessionRequest) -> None:
        super().send(message)
        self.origins.append(self._world.origin())

    def take(self) -> worker_pb2.SessionRequest:
        self.origins.popleft()
        return self._outbox.popleft()


_ENGINE_CONFIG = EngineConfig(model_path="none")
