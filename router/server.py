"""One router process without its command line: builds the parts, serves them, and takes them down in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
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
from router.service import AdminService, RouterService
from router.status import StatusReader
from router.telemetry import Telemetry, Tracer
from router.tenants import load_tenants
from router.tls import ServerTls, load_server_tls

LAST_WORD_S = 1.0
"""For a client to take in that its request was ended by a stop."""
CALLS_PER_REQUEST, MAX_OTHER_CALLS = 2, 64
"""gRPC's own limit, of all calls together. So far above that of live requests that those are refused with a hint."""
SERVICES = tuple(router_pb2.DESCRIPTOR.services_by_name[name] for name in ("Router", "Admin"))
ROUTER_SERVICE, ADMIN_SERVICE = (service.full_name for service in SERVICES)


class RouterServer:
    """Serves Router, Admin, health and reflection on one port, and HTTP on another.

    Health is SERVING exactly while at least one decode worker is ready.
    """

    def __init__(self, config: RouterConfig, model: ServedModel | None = None) -> None:
        """`model` is loaded from `config.model_path` by `start` unless it is given."""
        self._config = config
        self._model = model
        self._health = BoundedHealth()
        self._server: grpc.aio.Server | None = None
        self._http: HttpServer | None = None
        self.http_address = ""
        """HOST:PORT once it was started."""
        self._health_task: asyncio.Task[None] | None = None
        self._registry: Registry | None = None
        self._dispatcher: Dispatcher | None = None
        self._audit = AuditLog()
        self._tracer: Tracer | None = None

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

        Raises `ModelError`, or `ConfigError` naming a file of keys, certificates or prefixes, or a port that is taken;
        nothing stays open then.
        """
        tls = load_server_tls(self._config)
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
        router_pb2_grpc.add_AdminServicer_to_server(AdminService(self._config, status, tenants, audit), server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (ROUTER_SERVICE, ADMIN_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        port = self._bind(server, tls)
        routes = Routes(self._config, model, registry, front, metrics)
        status_routes = StatusRoutes(model.name, tenants, status, dispatcher, metrics, audit)
        http = HttpServer(self._config, tenants, metrics, routes, status_routes)
        try:
            self.http_address = await http.start(self._http_port(port), None if tls is None else tls.http)
        except ConfigError:
            await server.stop(0)
            raise
        self._registry, self._dispatcher, self._server, self._http = registry, dispatcher, server, http
        self._audit = audit
        registry.add_addresses(self._config.workers)
        await self._set_health(ready=False)
        self._health_task = asyncio.create_task(self._follow_readiness(), name="router health")
        await server.start()
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

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let the live ones finish within `grace_s`, end the rest, let go of the workers.

        What is ended is told so (`Draining`); a client that does not take that in `LAST_WORD_S` is cut off.

        Idempotent. Afterwards no task and no connection is left.
        """
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.enter_graceful_shutdown()
        task, self._health_task = self._health_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        assert self._http is not None, "both fronts are started together"
        end_s = grace_s + LAST_WORD_S
        error = Draining("the router is stopping")
        timer = asyncio.get_running_loop().call_later(grace_s, self.dispatcher.admission.end_all, error)
        await asyncio.gather(server.stop(end_s), self._http.stop(end_s))
        timer.cancel()
        self.dispatcher.close()
        self._audit.close()
        await self.registry.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def _http_port(self, grpc_port: int) -> int:
        if self._config.http_port is not None:
            return self._config.http_port
        return grpc_port + 1 if self._config.port else 0

    def _new_server(self) -> grpc.aio.Server:
        config = self._config
        size = ("grpc.max_receive_message_length", config.max_request_bytes)
        return grpc.aio.server(
            interceptors=[RefuseMalformed(SERVICES)],
            options=[*server_options(config.keepalive_s), size],
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
