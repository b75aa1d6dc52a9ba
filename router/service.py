"""The gRPC edge of the router: messages in, messages and status codes out. Decides nothing."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc

from engine.errors import ConfigError, EngineError
from kvrelay._status import abort, status_of
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router import validate
from router.audit import AuditLog
from router.config import RouterConfig
from router.front_door import FrontDoor
from router.served_model import ServedModel
from router.status import StatusReader
from router.telemetry import TraceHeaders
from router.tenants import Tenant, Tenants

_Context = grpc.aio.ServicerContext[Any, Any]


GiveOrder: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Has whoever supervises the cluster carry an order out. Raises the `EngineError` with which it was refused."""
DEFAULT_RECENT = 20
REQUEST_ID_KEY = "x-request-id"
"""Metadata of a call of Admin, and of its answer: what the audit log names it by."""
MAX_AUDIT_CHARS = 100
"""Of what a client chose, in a line of the audit log."""


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
            headers = trace_headers_of(context)
            await self._front.generate(tenant, request, context.write, context.time_remaining(), headers)
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
        status: StatusReader,
        tenants: Tenants,
        audit: AuditLog,
        give_order: GiveOrder | None = None,
    ) -> None:
        """`give_order`: None if nobody supervises a cluster around this router."""
        self._give_order = give_order
        self._config = config
        self._audit = audit
        self._tenants = tenants
        self._status = status

    async def Status(self, request: router_pb2.StatusRequest, context: _Context) -> router_pb2.StatusResponse:
        async with self._audited("Status", context):
            return self._status.read()

    async def Scale(self, request: router_pb2.ScaleRequest, context: _Context) -> router_pb2.ScaleResponse:
        replicas = dict(request.replicas)
        order = {"order": "scale", "replicas": replicas}
        return router_pb2.ScaleResponse(change=await self._change(order, request.wait_ms, context))

    async def Drain(self, request: router_pb2.DrainRequest, context: _Context) -> router_pb2.DrainResponse:
        order = {"order": "drain", "worker": request.worker_id}
        return router_pb2.DrainResponse(change=await self._change(order, request.wait_ms, context))

    async def Flip(self, request: router_pb2.FlipRequest, context: _Context) -> router_pb2.FlipResponse:
        order = {"order": "flip", "worker": request.worker_id}
        return router_pb2.FlipResponse(change=await self._change(order, request.wait_ms, context))

    async def _change(self, order: Mapping[str, Any], wait_ms: int, context: _Context) -> router_pb2.ClusterChange:
        name, *told = map(_told, order.values())
        async with self._audited(f"{name.capitalize()}({', '.join(told)})", context):
            if self._give_order is None:
                raise ConfigError("this router belongs to no cluster that it could change; `kvrelay up` starts one")
            done = await self._give_order({**order, "wait_s": wait_ms / 1000})
            return router_pb2.ClusterChange(changed=done["changed"], lines=done["lines"])

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


def _told(value: Any) -> str:
    """A part of an order, for the audit log: what a client chose is quoted, and no line of its own."""
    return ascii(value)[:MAX_AUDIT_CHARS] if isinstance(value, dict) else ascii(str(value))[1:-1][:MAX_AUDIT_CHARS]


def authorization_of(context: _Context) -> str | None:
    return _metadata(context, "authorization")


def trace_headers_of(context: _Context) -> TraceHeaders:
    return TraceHeaders(_metadata(context, "traceparent") or "", _metadata(context, "tracestate") or "")


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
