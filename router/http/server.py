"""Owns the HTTP sockets of a router and the calls that come in over them."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.errors import ConfigError, EngineError, RequestError, UnavailableError
from router.config import RouterConfig
from router.http import status_routes
from router.http.errors import error_response, fault_response, http_error_response
from router.http.refusal import Refusal
from router.http.routes import OPEN_PATHS, REQUEST_ID, TENANT, Routes, request_id_of
from router.http.status_routes import StatusRoutes
from router.metrics import RouterMetrics
from router.tenants import Tenants

logger = logging.getLogger(__name__)

CLOSE_S = 1.0
"""For connections without a call to close."""
KEEPALIVE_S = 75.0
"""For the next request on a connection; aiohttp's own default is an hour."""
QUIET_S = 2.0
"""A router that another one took over from closes connections when none of them has brought a call for so long."""
POLL_S = 0.05
"""Between two looks at who is still connected: aiohttp tells nobody."""
MAX_HEADER_BYTES = 8190
"""Of each header and of the request line; there may be 128."""
MAX_REFUSED = 64
"""Connections beyond the limit that may wait to be told so."""
_SERVER = "kvrelay"
"""aiohttp's own would tell its version."""


class Connection(web.RequestHandler):
    """Answers what is no HTTP in the shape of every refusal. aiohttp would log a client's fault as one of ours."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = error_response(RequestError("request", f"is no HTTP that is served here: {exc.message}"), 0.0)
        response.headers["Server"] = _SERVER
        response.force_close()
        return response


_KEYLESS = OPEN_PATHS | status_routes.PATHS | status_routes.FILES.keys()
"""Open, or with a look of their own at who asks."""


class HttpServer:
    """Serves `routes` on one port.

    A client that goes away cancels its call where it waits. However a handler ends, nothing of its call is left.
    """

    def __init__(
        self, config: RouterConfig, tenants: Tenants, metrics: RouterMetrics, routes: Routes, status: StatusRoutes
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._tenants = tenants
        self._calls: set[asyncio.Task[None]] = set()
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections that have brought no request yet, and when their time is over."""
        self._refused: dict[Refusal, None] = {}
        """Beyond the limit, oldest first."""
        self._hands_over = False
        self._called_at = 0.0
        """When the last call ended; on the event loop's clock."""
        self._listener: asyncio.Server | None = None
        app = web.Application(middlewares=[self._answer_errors], client_max_size=config.max_request_bytes)
        app.on_response_prepare.append(self._add_headers)
        routes.add_to(app)
        status.add_to(app)
        self._of_connections: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,  # `bodies` does that, within its limits
            "keepalive_timeout": KEEPALIVE_S,
            "max_line_size": MAX_HEADER_BYTES,
            "max_field_size": MAX_HEADER_BYTES,
        }
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S, **self._of_connections)

    async def start(self, port: int, tls: ssl.SSLContext | None = None) -> str:
        """Listen; returns HOST:PORT. Raises `ConfigError` naming the port if it is taken; nothing stays open then."""
        await self._runner.setup()
        host = self._config.host
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._connection, host, port, ssl=tls, reuse_port=self._config.shares_ports or None
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}") from error
        return f"{host}:{self._listener.sockets[0].getsockname()[1]}"

    def hand_over(self) -> None:
        """Each connection's next answer is its last: clients come back to the router that listens now."""
        self._hands_over = True

    async def drain(self, grace_s: float) -> None:
        """Take no new connections, and stop once those that are open are gone or bring nothing for `QUIET_S`.

        To close one at once would fail the call that is on its way. After `grace_s` it is `stop`.
        """
        loop = asyncio.get_running_loop()
        over = loop.time() + grace_s
        self._called_at = loop.time()
        if self._listener is not None:
            self._listener.close()
        while loop.time() < over and self._runner.server is not None and self._runner.server.connections:
            if not self._calls and loop.time() >= self._called_at + QUIET_S:
                break
            await asyncio.sleep(POLL_S)
        await self.stop(max(0.0, over - loop.time()))

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, let live calls finish within `grace_s`, end the rest."""
        if self._listener is not None:
            self._listener.close()
        for timer in self._silent.values():
            timer.cancel()
        self._silent.clear()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace_s)
        for call in self._calls:
            call.cancel()
        await self._runner.cleanup()

    def _connection(self) -> asyncio.BaseProtocol:
        """Of a client that has some time to ask something; aiohttp would wait for it without end."""
        assert self._runner.server is not None, "it was set up"
        limit = self._config.max_http_connections
        if len(self._runner.server.connections) >= limit:
            error = UnavailableError(f"{limit} HTTP connections are open, the limit; try again later")
            return self._refuse(error_response(error, self._config.retry_after_s))
        handler = Connection(self._runner.server, loop=asyncio.get_running_loop(), **self._of_connections)
        timer = asyncio.get_running_loop().call_later(self._config.body_timeout_s, self._close_silent, handler)
        self._silent[handler] = timer
        return handler

    def _refuse(self, answer: web.Response) -> Refusal:
        """However many come at once, few of them are open: the oldest is told nothing then."""
        if len(self._refused) >= MAX_REFUSED:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.abort()
        refusal = Refusal(answer, CLOSE_S, lambda refusal: self._refused.pop(refusal, None))
        self._refused[refusal] = None
        return refusal

    def _close_silent(self, handler: web.RequestHandler) -> None:
        del self._silent[handler]
        if handler.transport is not None:
            handler.transport.abort()

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Nothing is read of a request whose sender is unknown. Every refusal and fault has OpenAI's shape."""
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._calls.add(task)
        if (timer := self._silent.pop(request.protocol, None)) is not None:
            timer.cancel()
        try:
            response = await self._answer(request, handler)
            resource = request.match_info.route.resource
            self._metrics.answered("unknown" if resource is None else resource.canonical, response.status)
            return response
        finally:
            self._calls.discard(task)
            self._called_at = asyncio.get_running_loop().time()

    async def _answer(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            if request.path not in _KEYLESS:
                request[TENANT] = self._tenants.identify(request.headers.get("Authorization"))
            return await handler(request)
        except EngineError as error:
            return error_response(error, self._config.retry_after_s)
        except web.HTTPException as error:
            return http_error_response(error)
        except Exception:  # edge: a fault of ours must be an answer, not a closed connection
            logger.exception("%s %s", request.method, request.path)
            return fault_response()

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """To every answer, those of refusals and streams too."""
        response.headers[REQUEST_ID] = request_id_of(request)
        response.headers["Server"] = _SERVER
        if self._hands_over:
            response.force_close()
            response.headers["Connection"] = "close"
