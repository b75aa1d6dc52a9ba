"""One router process without its command line: builds the parts, serves them, and takes them down in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from engine.errors import ConfigError, Draining
from kvrelay._server import BoundedHealth, server_options
from kvrelay.v1 import router_pb2, router_pb2_grpc
from router.audit import AuditLog
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.front_door import FrontDoor
from router.http.routes import Routes
from router.http.server import HttpServer
from router.http.status_routes import StatusRoutes
from router.malformed import RefuseMalformed
from router.metrics import RouterMetrics
from router.native.index import make_index
from router.registry import Registry
from router.served_model import ServedModel, load_served_model
from router.service import AdminService, GiveOrder, RouterService
from router.shared_port import prefer_newest
from router.status import StatusReader
from router.telemetry import Telemetry, Tracer
from router.tenants import load_tenants
from router.tls import ServerTls, load_server_tls

LAST_WORD_S = 1.0
"""For a client to take in that its request was ended by a stop."""
CALLS_PER_REQUEST, MAX_OTHER_CALLS = 2, 64
"""gRPC's own limit, of all calls together: for each request that may be live also a client that watches the health, and
some more. So requests beyond their own limit are refused with a hint."""
HANDSHAKE_S = 1.0
"""For connections that began when this router was the one to take them: it listens so long after another took over."""
SERVICES = tuple(router_pb2.DESCRIPTOR.services_by_name[name] for name in ("Router", "Admin"))
ROUTER_SERVICE, ADMIN_SERVICE = (service.full_name for service in SERVICES)


class RouterServer:
    """Serves Router, Admin, health and reflection on one port, and HTTP on another.

    Health is SERVING exactly while at least one decode worker is ready.
    """

    def __init__(
        self, config: RouterConfig, model: ServedModel | None = None, give_order: GiveOrder | None = None
    ) -> None:
        """`model` is loaded from `config.model_path` by `start` unless it is given. `give_order`: to whoever supervises
        the cluster, if somebody does."""
        self._config = config
        self._model = model
        self._give_order = give_order
        self._health = BoundedHealth(config.max_live_requests)
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self.http_address = ""
        """HOST:PORT once it was started."""
        self._health_task: asyncio.Task[None] | None = None
        self._registry: Registry | None = None
        self._dispatcher: Dispatcher | None = None
        self._audit = AuditLog()
        self._tracer: Tracer | None = None
        self._tls: ServerTls | None = None
        self._ended: asyncio.Event | None = None
        """Set when its end, once begun, is over."""

    @property
    def registry(self) -> Registry:
        assert self._registry is not None, "the router was not started"
        return self._registry

    @property
    def dispatcher(self) -> Dispatcher:
        assert self._dispatcher is not None, "the router was not started"
        return self._dispatcher

    async def start(self) -> str:
        """Serve; returns HOST:PORT of gRPC. Workers are connected in the background.

        Raises what `prepare` and `listen` raise; nothing stays open then.
        """
        await self.prepare()
        return await self.listen()

    async def prepare(self) -> None:
        """All but listening; `registry` may connect to workers then. `stop` undoes it.

        Raises `ModelError`, or `ConfigError` naming a file of keys, certificates or prefixes.
        """
        self._tls = load_server_tls(self._config)
        tenants = load_tenants(self._config.api_keys)
        audit = AuditLog(self._config.audit_log)
        model = self._model
        if model is None:
            config = self._config
            model = await asyncio.to_thread(
                load_served_model, Path(config.model_path), config.model_name, config.public_prefixes
            )
        index = await asyncio.to_thread(
            make_index, self._config.index_bytes, self._config.speculation_s, self._config.native_cache
        )
        registry = Registry(self._config, model.fingerprint, index)
        dispatcher = Dispatcher(self._config, model, registry)
        tracer = self._tracer = _open_tracer(self._config, model.name)
        counts = dict if tracer is None else tracer.counts
        metrics = RouterMetrics(dispatcher.admission, registry, dispatcher.history, counts)
        wanted = tracer is not None or self._config.log_calls
        telemetry = Telemetry(tracer, self._config.log_calls, time.monotonic) if wanted else None
        front = FrontDoor(self._config, tenants, dispatcher, metrics, telemetry=telemetry)
        server = self._new_server()
        router_pb2_grpc.add_RouterServicer_to_server(RouterService(self._config, model, front), server)
        status = StatusReader(self._config, _version(), registry, dispatcher)
        admin = AdminService(self._config, status, tenants, audit, self._give_order)
        router_pb2_grpc.add_AdminServicer_to_server(admin, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (ROUTER_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        self._registry, self._dispatcher, self._server, self._audit = registry, dispatcher, server, audit
        routes = Routes(self._config, model, registry, front, metrics)
        status_routes = StatusRoutes(model.name, tenants, status, dispatcher, metrics, audit)
        self._http = HttpServer(self._config, tenants, metrics, routes, status_routes)
        registry.add_addresses(self._config.workers)

    async def listen(self) -> str:
        """Returns HOST:PORT of gRPC. Raises `ConfigError` naming a port that is taken; then it is as after `stop`."""
        assert self._server is not None, "it was not prepared"
        assert self._http is not None, "both fronts are made together"
        tls = self._tls
        try:
            port = self._bind(self._server, tls)
            self.http_address = await self._http.start(self._http_port(port), None if tls is None else tls.http)
        except ConfigError:
            await self.stop(0.0)
            raise
        await self._set_health(ready=self.registry.is_ready())
        self._health_task = asyncio.create_task(self._follow_readiness(), name="router health")
        await self._server.start()
        if self._config.shares_ports:
            prefer_newest(port, int(self.http_address.rpartition(":")[2]))
        return f"{self._config.host}:{port}"

    def _bind(self, server: grpc.aio.Server, tls: ServerTls | None) -> int:
        wanted = f"{self._config.host}:{self._config.port}"
        try:
            return server.add_insecure_port(wanted) if tls is None else server.add_secure_port(wanted, tls.grpc)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {wanted}: the port is in use, or the address not ours") from error

    def set_workers(self, addresses: Mapping[str, str]) -> None:
        """Make the known workers exactly `addresses` (worker id to HOST:PORT). On the event loop."""
        self.registry.set_workers(addresses)

    async def retire(self, grace_s: float) -> None:
        """After another router listens on the same ports: like `stop`, and no connection is refused or reset by it.

        Calls that come over open connections are served for `HANDSHAKE_S`; then gRPC tells its clients to go, and HTTP
        does so with its next answer.
        """
        if self._server is None:
            return
        assert self._http is not None, "both fronts are made together"
        self._http.hand_over()
        await asyncio.sleep(HANDSHAKE_S)
        await self._end(grace_s, self._http.drain)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let the live ones finish within `grace_s`, end the rest, let go of the workers.

        What is ended is told so (`Draining`); a client that does not take that in `LAST_WORD_S` is cut off.

        Idempotent; of a router that retires already it is the shorter bound that counts. Afterwards no task and no
        connection is left.
        """
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            assert self._http is not None, "both fronts are made together"
            await self._end(grace_s, self._http.stop)
        elif self._ended is not None:
            timer = self._end_calls_after(grace_s)
            await self._ended.wait()
            timer.cancel()

    async def _end(self, grace_s: float, end_http: Callable[[float], Awaitable[None]]) -> None:
        server, self._server = self._server, None
        if server is None:  # it was stopped while it waited
            return
        self._ended = asyncio.Event()
        task, self._health_task = self._health_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        end_s = grace_s + LAST_WORD_S
        timer = self._end_calls_after(grace_s)
        await asyncio.gather(server.stop(end_s), end_http(end_s))
        timer.cancel()
        self.dispatcher.close()
        self._audit.close()
        await self.registry.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)
        self._ended.set()

    def _end_calls_after(self, grace_s: float) -> asyncio.TimerHandle:
        error = Draining("the router is stopping")
        return asyncio.get_running_loop().call_later(grace_s, self.dispatcher.admission.end_all, error)

    def _http_port(self, grpc_port: int) -> int:
        if self._config.http_port is not None:
            return self._config.http_port
        return grpc_port + 1 if self._config.port else 0

    def _new_server(self) -> grpc.aio.Server:
        config = self._config
        size = ("grpc.max_receive_message_length", config.max_request_bytes)
        return grpc.aio.server(
            interceptors=[RefuseMalformed(SERVICES)],
            options=[*server_options(config.keepalive_s, shares_port=config.shares_ports), size],
            maximum_concurrent_rpcs=CALLS_PER_REQUEST * config.max_live_requests + MAX_OTHER_CALLS,
        )

    async def _follow_readiness(self) -> None:
        ready = False
        while True:
            if self.registry.is_ready() is not ready:
                ready = not ready
                await self._set_health(ready)
            else:
                await self.registry.changed()

    async def _set_health(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", ROUTER_SERVICE):
            await self._health.set(service, status)


def _open_tracer(config: RouterConfig, model: str) -> Tracer | None:
    if not config.otlp_endpoint:
        return None
    try:
        from router.otel import OtelTracer  # an extra; nobody else waits for its import
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint needs OpenTelemetry: pip install 'kvrelay[otel]' ({error})") from error
    return OtelTracer(config.otlp_endpoint, config.trace_ratio, config.router_id, model)


def _version() -> str:
    try:
        return metadata.version("kvrelay")
    except metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"
