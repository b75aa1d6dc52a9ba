"""What a router knows of itself and its workers, as the message that Admin.Status answers with. Decides nothing."""

from __future__ import annotations

import asyncio

from kvrelay.v1 import router_pb2
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.explain import TermError
from router.peer import Peer
from router.registry import Departed, Registry
from router.worker_client import WorkerClient, WorkerState


class StatusReader:
    """On the event loop."""

    def __init__(self, config: RouterConfig, version: str, registry: Registry, dispatcher: Dispatcher) -> None:
        self._config = config
        self._version = version
        self._registry = registry
        self._dispatcher = dispatcher

    def read(self) -> router_pb2.StatusResponse:
        """The whole message; all known workers first, then those that were taken away lately."""
        history, now = self._dispatcher.history, asyncio.get_running_loop().time()
        return router_pb2.StatusResponse(
            router_id=self._config.router_id,
            version=self._version,
            uptime_ms=self._dispatcher.uptime_ms(),
            workers=[
                *(_worker_status(client, now) for client in self._registry.workers),
                *(_departed_status(gone, now) for gone in self._registry.departed()),
            ],
            live_requests=self._dispatcher.admission.live,
            requests_total=history.requests_total,
            requests_failed=history.requests_failed,
            requests_cancelled=history.requests_cancelled,
            requests_refused=history.requests_refused,
            prefix_index=_index_status(self._registry),
            term_errors=[_term_error(name, error) for name, error in history.term_errors.items()],
        )


def _index_status(registry: Registry) -> router_pb2.PrefixIndexStatus:
    stats = registry.index.stats()
    return router_pb2.PrefixIndexStatus(
        keys=stats.keys,
        speculative_keys=stats.speculative_keys,
        num_bytes=stats.num_bytes,
        max_bytes=stats.max_bytes,
        evictions=stats.evictions,
        implementation=registry.index.implementation,
    )


def _term_error(name: str, error: TermError) -> router_pb2.TermError:
    count = error.count
    return router_pb2.TermError(
        name=name, count=count, mean_ms=error.sum_ms / count, mean_abs_ms=error.sum_abs_ms / count
    )


def _worker_status(client: WorkerClient, now: float) -> router_pb2.WorkerStatus:
    """Of a worker that is not ready, what was last known of it, without its load."""
    state = "draining" if client.draining and client.session is not None else client.state.value
    status = router_pb2.WorkerStatus(address=client.address, state=state, detail=client.detail)
    if client.peer is not None:
        _introduce(status, client.peer)
    if client.session is not None:
        load = client.session.load
        status.running = load.running
        status.waiting = load.waiting
        status.blocks_free = load.blocks_free
        status.blocks_cached = load.blocks_cached
        status.blocks_owned = load.blocks_owned
        status.blocks_leased = load.blocks_leased
        status.blocks_quarantined = load.blocks_quarantined
        status.prefill_tokens_per_s = load.prefill_tokens_per_s
        status.decode_step_ms = load.decode_step_ms
        status.resident_bytes = load.resident_bytes
        status.errors.update(load.errors)
        if (blocks := client.session.blocks) is not None:
            status.blocks_state = blocks.state.value
            status.blocks_staleness_s = blocks.staleness_s(now)
            status.blocks_lists = blocks.counts.lists
            status.blocks_noted = blocks.num_keys
            status.blocks_digest = blocks.digest
    return status


def _departed_status(gone: Departed, now: float) -> router_pb2.WorkerStatus:
    status = router_pb2.WorkerStatus(address=gone.peer.address, state=WorkerState.LOST.value, detail=gone.detail(now))
    _introduce(status, gone.peer)
    return status


def _introduce(status: router_pb2.WorkerStatus, peer: Peer) -> None:
    status.worker_id = peer.worker_id
    status.incarnation = peer.incarnation
    status.role = peer.role
    status.pid = peer.pid
    status.blocks_total = peer.num_blocks
    status.device = peer.device
    status.kernels = peer.kernels
