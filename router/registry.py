"""Owns the workers that this router knows: their clients, what state each is in and why, and who may serve.

Others get snapshots, or a session to put a request on.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from engine.errors import RequestError
from kvrelay.v1 import worker_pb2
from router.config import RouterConfig
from router.peer import Peer, check_peer
from router.prefix_index import PrefixIndex
from router.reference_index import ReferenceIndex
from router.session import WorkerSession
from router.snapshot import DECODE, PREFILL, WorkerSnapshot
from router.worker_client import WorkerClient, WorkerState

logger = logging.getLogger(__name__)

MAX_DEPARTED = 64
"""Of the workers that were taken away, how many are remembered."""


@dataclass(frozen=True, slots=True)
class Departed:
    """A worker that is not dialled any more."""

    peer: Peer
    why: str
    at: float
    """When it was lost, or else taken away; on the event loop's clock."""

    def told(self, now: float) -> str:
        return f"{self.peer.worker_id} ({self.peer.address}): {self.detail(now)}"

    def detail(self, now: float) -> str:
        return f"lost {now - self.at:.0f} s ago: {self.why}"


class Registry:
    """Invariants: two ready workers never share an id; all ready workers have one fingerprint, the router's with
    weights of one type, and one block size; a client is in `_clients` exactly while its task is in `_tasks`.
    """

    def __init__(self, config: RouterConfig, fingerprint: bytes, index: PrefixIndex | None = None) -> None:
        """`index`: by default one in Python."""
        self._config = config
        self._fingerprint = fingerprint
        self.index = index or ReferenceIndex(config.index_bytes, config.speculation_s)
        """Of what is resident at the ready workers."""
        self._clients: dict[str, WorkerClient] = {}
        """By worker id where the cluster told it, else by address."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        """Cancelled, not yet done."""
        self._introduced: set[WorkerSession] = set()
        """Sessions that know each other."""
        self._change = asyncio.Event()
        self._departed: dict[str, Departed] = {}
        """By name; the last that were taken away, oldest first."""
        self._was_ready = False
        self._ready_until = -math.inf
        """When a decode worker was last known to be ready."""

    def add_addresses(self, addresses: Iterable[str]) -> None:
        """Workers whose ids are not known beforehand."""
        for address in addresses:
            self._add(address, address, None)

    def set_workers(self, addresses: Mapping[str, str], draining: Collection[str] = ()) -> None:
        """Make the known workers exactly `addresses` (worker id to HOST:PORT).

        A worker that is left out, or that moved, is given up: its requests get `WorkerLost` and go on elsewhere.
        One that is `draining` keeps what it has; it is no ready worker for anything new.
        """
        for key, client in list(self._clients.items()):
            if addresses.get(key) != client.address:
                self._remember(client)
                self._drop(key)
        for worker_id, address in addresses.items():
            self._departed.pop(worker_id, None)
            if worker_id not in self._clients:
                self._add(worker_id, address, worker_id)
            self._clients[worker_id].draining = worker_id in draining
        self._notify()

    async def wait_idle(self, worker_id: str) -> None:
        """Return once no request of this router is on the worker, or it is no ready worker any more."""
        client = self._clients.get(worker_id)
        if client is not None and client.session is not None:
            await client.session.wait_idle()

    async def close(self) -> None:
        """Give up every worker. Returns when no task is left."""
        for key in list(self._clients):
            self._drop(key)
        while self._leaving:
            await asyncio.wait(self._leaving)

    async def changed(self) -> None:
        """Wait for the next change of any worker's state."""
        await self._change.wait()

    @property
    def workers(self) -> tuple[WorkerClient, ...]:
        return tuple(self._clients.values())

    def departed(self) -> list[Departed]:
        """Workers that `set_workers` took away within `worker_memory_s`, and that did not come back; oldest first."""
        since = self._now() - self._config.worker_memory_s
        self._departed = {name: gone for name, gone in self._departed.items() if gone.at >= since}
        return list(self._departed.values())

    def was_ready_lately(self) -> bool:
        """Whether a decode worker is ready, or was within `worker_memory_s`."""
        return self.is_ready() or self._now() - self._ready_until <= self._config.worker_memory_s

    def session(self, worker_id: str) -> WorkerSession:
        """Of a ready worker; `KeyError` if it is none."""
        for session in self._sessions():
            if session.peer.worker_id == worker_id:
                return session
        raise KeyError(worker_id)

    def snapshots(self) -> list[WorkerSnapshot]:
        """All ready workers that take new requests."""
        return [session.snapshot() for session in self._open_sessions()]

    def ignorant_of(self, fields: frozenset[str]) -> frozenset[str]:
        """Ids of the ready workers that would ignore one of these fields of sampling.

        Raises `RequestError` if that is every decode worker, of one or more.
        """
        if not fields:
            return fields
        peers = [session.peer for session in self._open_sessions()]
        decode = [peer.sampling_fields for peer in peers if peer.role == DECODE]
        if decode and not any(fields <= known for known in decode):
            unknown = min(fields - decode[0])
            raise RequestError(unknown, f"is not known to any of the {len(decode)} decode workers, of older versions")
        return frozenset(peer.worker_id for peer in peers if not fields <= peer.sampling_fields)

    def is_ready(self) -> bool:
        """Whether requests can be served: prefill workers help, decode workers are needed."""
        return any(session.peer.role == DECODE for session in self._open_sessions())

    def roomiest(self) -> WorkerSnapshot | None:
        """The ready decode worker that can hold the largest request; None if none is ready."""
        decode = [snapshot for snapshot in self.snapshots() if snapshot.role == DECODE]
        return max(decode, key=lambda snapshot: snapshot.max_request_tokens, default=None)

    def why_not_ready(self) -> str:
        """Every known worker that is not ready, and why."""
        return "; ".join(self._reasons()) or self._no_reason()

    def why_no_decode_worker(self) -> str:
        """For a client that finds none: also who was taken away lately, and why."""
        now = self._now()
        return "; ".join([*(gone.told(now) for gone in self.departed()), *self._reasons()]) or self._no_reason()

    def check_integrity(self) -> None:
        """Whatever is going on."""
        assert self._clients.keys() == self._tasks.keys(), "a client without a task, or a task without a client"
        ids = [session.peer.worker_id for session in self._sessions()]
        assert len(set(ids)) == len(ids), f"a worker is connected twice: {ids}"
        assert len({session.peer.block_size for session in self._sessions()}) <= 1, "block sizes differ"
        for session in self._sessions():
            session.check_integrity()

    def check_idle(self) -> None:
        """While no request is live."""
        self.check_integrity()
        for session in self._sessions():
            assert session.in_flight == 0, f"{session.in_flight} requests were left on {session.peer.worker_id}"

    def _reasons(self) -> list[str]:
        return [
            f"{client.name} is {client.state}: {client.detail}"
            for client in self._clients.values()
            if client.session is None
        ]

    def _no_reason(self) -> str:
        return "none of the ready workers is a decode worker" if self._clients else "no worker is known"

    def _remember(self, client: WorkerClient) -> None:
        if client.peer is None or client.draining:
            return  # it never said who it is; or its going was planned
        why = client.lost_because if client.state is WorkerState.LOST else client.detail
        gone = Departed(client.peer, why or client.detail or "taken out of service", client.lost_at or self._now())
        self._departed.pop(gone.peer.worker_id, None)
        self._departed[gone.peer.worker_id] = gone
        if len(self._departed) > MAX_DEPARTED:
            del self._departed[next(iter(self._departed))]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _sessions(self) -> list[WorkerSession]:
        return [client.session for client in self._clients.values() if client.session is not None]

    def _open_sessions(self) -> list[WorkerSession]:
        """Of those that take new requests."""
        clients = self._clients.values()
        return [client.session for client in clients if client.session is not None and not client.draining]

    def _add(self, key: str, address: str, expected_id: str | None) -> None:
        def accept(peer: Peer) -> None:
            check_peer(peer, self._fingerprint, [session.peer for session in self._sessions()], expected_id)

        client = WorkerClient(address, self._config, accept, self._notify, self.index)
        self._clients[key] = client
        task = asyncio.get_running_loop().create_task(client.run(), name=f"worker {address}")
        task.add_done_callback(_log_fault)
        self._tasks[key] = task

    def _drop(self, key: str) -> None:
        del self._clients[key]
        task = self._tasks.pop(key)
        task.cancel()
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _notify(self) -> None:
        """Wake everyone who waits now; who waits later waits for the next change."""
        ready = self.is_ready()
        if ready or self._was_ready:
            self._ready_until = self._now()
        self._was_ready = ready
        self._introduce()
        self._change.set()
        self._change = asyncio.Event()

    def _introduce(self) -> None:
        """Tell prefill workers of decode workers, once one of the two is new, so that their links are open in time."""
        sessions = self._sessions()
        for one in sessions:
            for other in sessions:
                met = one in self._introduced and other in self._introduced
                if not met and one.peer.role == PREFILL and one.peer.transports and other.peer.prewarm is not None:
                    one.send(worker_pb2.SessionRequest(prewarm=other.peer.prewarm))
        self._introduced = set(sessions)


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: a fault of the router ended it", task.get_name(), exc_info=error)
