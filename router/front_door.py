"""What every call passes on its way to `dispatch`, whichever protocol brought it: the account that is kept of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from engine.errors import DeadlineExceeded
from kvrelay.v1 import router_pb2
from router.client_stream import Emit
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics


class FrontDoor:
    def __init__(
        self,
        config: RouterConfig,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dispatcher = dispatcher
        self._config = config
        self._metrics = metrics
        self._clock = clock

    async def generate(self, message: router_pb2.GenerateRequest, emit: Emit, timeout_s: float | None) -> None:
        """`Dispatcher.generate`, measured."""
        with self._metrics.call(self._clock()) as call:

            async def metered(event: router_pb2.GenerateResponse) -> None:
                await emit(event)
                call.sent(event, self._clock())

            await self.dispatcher.generate(message, metered, timeout_s)
            call.finished(self._clock())

    async def tokenize(self, message: router_pb2.TokenizeRequest, timeout_s: float | None) -> bytes:
        """Token ids, little-endian u32. Raises what `Prompts.tokens` raises, or `DeadlineExceeded`."""
        timeout_s = self._config.default_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self.dispatcher.prompts.tokens(message, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the call's {timeout_s:g} s are over") from None
