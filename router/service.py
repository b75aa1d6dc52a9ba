"""The gRPC edge of the router: messages in, messages and status codes out. Decides nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc

from engine.errors import EngineError
from kvrelay._status import abort_arguments, status_of
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router import validate
from router.audit import AuditLog
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.explain import TermError
from router.front_door import FrontDoor
from router.peer import Peer
from router.registry import Departed, Registry
from router.served_model import ServedModel
from router.tenants import Tenant, Tenants
from router.worker_client import WorkerClient, WorkerState

_Context = grpc.aio.ServicerContext[Any, Any]


DEFAULT_RECENT = 20
REQUEST_ID_KEY = "x-request-id"
"""Metadata of a call of Admin, and of its answer: what the audit log names it by."""


class RouterService(router_pb2_grpc.RouterServicer):
    """Every method begins with `_tenant`: without a key that is known, nothing is answered."""

    def __init__(self, config: RouterConfig, model: ServedModel, front: FrontDoor) -> None:
        self._config = config
        self._model = model
        self._front = front

    # The generated types know servicer methods that are generators. grpc.aio also takes coroutines that write: those
    # are cancelled where they wait, while a generator would be left suspended at its yield.
    async def Generate(self, request: router_pb2.GenerateRequest, context: _Context) -> None:  # type: ignore[override]
        try:
            tenant = self._tenant(context)
            await self._front.generate(tenant, request, context.write, context.time_remaining())
        except EngineError as error:
            await self._abort(context, error)

    async def Cancel(self, request: router_pb2.CancelRequest, context: _Context) -> router_pb2.CancelResponse:
        try:
            return router_pb2.CancelResponse(found=self._front.cancel(self._tenant(context), request.request_id))
        except EngineError as error:
            await self._abort(context, error)

    async def Tokenize(self, request: router_pb2.TokenizeRequest, context: _Context) -> router_pb2.TokenizeResponse:
        try:
            with self._front.limits.hold(self._tenant(context), 1):
                validate.check_model(request.model, self._model)
                token_ids = await self._front.tokenize(request, context.time_remaining())
            return router_pb2.TokenizeResponse(token_ids=token_ids)
        except EngineError as error:
            await self._abort(context, error)

    async def Explain(self, request: router_pb2.ExplainRequest, context: _Context) -> router_pb2.ExplainResponse:
        try:
            return self._front.explain(self._tenant(context), request.request_id)
        except EngineError as error:
            await self._abort(context, error)

    async def ListRecent(
        self, request: router_pb2.ListRecentRequest, context: _Context
    ) -> router_pb2.ListRecentResponse:
        try:
            recent = self._front.recent(self._tenant(context), request.limit or DEFAULT_RECENT)
        except EngineError as error:
            await self._abort(context, error)
        return router_pb2.ListRecentResponse(requests=recent)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: _Context
    ) -> router_pb2.ListModelsResponse:
        try:
            self._tenant(context)
        except EngineError as error:
            await self._abort(context, error)
        model = self._model
        card = router_pb2.ModelCard(name=model.name, max_model_len=model.max_model_len, fingerprint=model.fingerprint)
        return router_pb2.ListModelsResponse(models=[card])

    def _tenant(self, context: _Context) -> Tenant:
        return self._front.tenants.identify(authorization_of(context))

    async def _abort(self, context: _Context, error: EngineError) -> NoReturn:
        await abort(context, error, self._config.retry_after_s)


class AdminService(router_pb2_grpc.AdminServicer):
    """Every method goes through `_audited`."""

    def __init__(
        self,
        config: RouterConfig,
        version: str,
        registry: Registry,
        dispatcher: Dispatcher,
        tenants: Tenants,
        audit: AuditLog,
    ) -> None:
        self._config = config
        self._audit = audit
        self._tenants = tenants
        self._version = version
        self._registry = registry
        self._dispatcher = dispatcher

    async def Status(self, request: router_pb2.StatusRequest, context: _Context) -> router_pb2.StatusResponse:
        async with self._audited("Status", context):
            return self._status()

    @asynccontextmanager
    async def _audited(self, what: str, context: _Context) -> AsyncIterator[None]:
        """The body runs for who may call Admin. Who asked for what, and how it ended, goes to the audit log."""
        who, outcome, request_id = "unknown", "FAULT", ""
        try:
            request_id = _request_id_of(context)
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            tenant = self._tenants.identify(authorization_of(context))
            who = tenant.name
            tenant.check_admin()
            yield
            outcome = "OK"
        except EngineError as error:
            outcome = status_of(error).name
            await abort(context, error, self._config.retry_after_s)
        finally:
            self._audit.record(
                request_id=request_id, identity=who, peer=context.peer(), call=f"Admin.{what}", result=outcome
            )

    def _status(self) -> router_pb2.StatusResponse:
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


def authorization_of(context: _Context) -> str | None:
    return _metadata(context, "authorization")


def _metadata(context: _Context, name: str) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return None


def _request_id_of(context: _Context) -> str:
    """The client's, or a new one."""
    request_id = _metadata(context, REQUEST_ID_KEY) or uuid.uuid4().hex
    validate.check_request_id(request_id)
    return request_id


async def abort(context: _Context, error: EngineError, retry_after_s: float) -> NoReturn:
    await context.abort(*abort_arguments(error, retry_after_s))
    raise AssertionError("abort always raises")


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
