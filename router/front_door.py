"""What every call passes on its way in, whichever protocol brought it: who calls, what that tenant may, the account.

`dispatch` serves it then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from engine.errors import DeadlineExceeded
from kvrelay.v1 import router_pb2
from router import validate
from router.client_stream import Emit
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.limits import TenantLimits
from router.metrics import RouterMetrics
from router.telemetry import NO_HEADERS, CallRecord, Telemetry, TraceHeaders
from router.tenants import Tenant, Tenants


class FrontDoor:
    def __init__(
        self,
        config: RouterConfig,
        tenants: Tenants,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.tenants = tenants
        self.limits = TenantLimits()
        self._config = config
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._telemetry = telemetry

    async def generate(
        self,
        tenant: Tenant,
        message: router_pb2.GenerateRequest,
        emit: Emit,
        timeout_s: float | None,
        headers: TraceHeaders = NO_HEADERS,
    ) -> None:
        """`Dispatcher.generate` within the tenant's limits, measured, and traced where that is wanted."""
        now = self._clock()
        with self._metrics.call(now) as call, self._told(tenant, message, headers) as record:
            validate.check_n(message, self._config.max_n)
            with self.limits.admit(tenant, message.n or 1, now):

                async def metered(event: router_pb2.GenerateResponse) -> None:
                    await emit(event)
                    now = self._clock()
                    self.limits.charge(tenant, call.sent(event, now), now)
                    if record is not None:
                        record.note(event)

                traceparent = "" if record is None else record.traceparent
                await self._dispatcher.generate(message, metered, timeout_s, tenant, traceparent)
                call.finished(self._clock())

    def _told(
        self, tenant: Tenant, message: router_pb2.GenerateRequest, headers: TraceHeaders
    ) -> AbstractContextManager[CallRecord | None]:
        telemetry = self._telemetry
        return nullcontext() if telemetry is None else telemetry.call(tenant.name, message, headers)

    def cancel(self, tenant: Tenant, request_id: str) -> bool:
        """End a live request of this tenant. False: it has none of this id."""
        return self._dispatcher.admission.cancel(tenant.qualified(request_id))

    def explain(self, tenant: Tenant, request_id: str) -> router_pb2.ExplainResponse:
        """Of a recent request of this tenant."""
        explained = self._dispatcher.history.find(tenant.qualified(request_id), request_id).to_proto()
        explained.request_id = request_id
        return explained

    def recent(self, tenant: Tenant, limit: int) -> list[router_pb2.ExplainResponse]:
        """The last requests of this tenant, newest first, each with the pair that was chosen."""
        prefix = tenant.qualified("")
        told = [record.to_proto(max_pairs=1) for record in self._dispatcher.history.recent(limit, prefix)]
        for explained in told:
            explained.request_id = explained.request_id.removeprefix(prefix)
        return told

    async def tokenize(self, message: router_pb2.TokenizeRequest, timeout_s: float | None) -> bytes:
        """Token ids, little-endian u32. Raises what `Prompts.tokens` raises, or `DeadlineExceeded`."""
        timeout_s = self._config.default_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._dispatcher.prompts.tokens(message, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the call's {timeout_s:g} s are over") from None
