"""What bounds those whom a gRPC server of ours serves: connections that say nothing, and watches of its health."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

HANDSHAKE_TIMEOUT_S = 5.0
"""For a connection to begin with HTTP/2's preface and settings. gRPC's own would be 120 s."""
IDLE_TIMEOUT_S = 60.0
"""For a connection without a call. Channels connect again with their next one, unseen."""
MAX_WATCHES = 16
"""Of a worker's health, at once: by supervisors."""


def server_options(keepalive_s: float, *, shares_port: bool = False) -> list[tuple[str, int]]:
    """A peer that vanished without closing its connection is noticed within two `keepalive_s`, and its calls end."""
    keepalive_ms = round(1e3 * keepalive_s)
    return [
        # Else a second server would share the port instead of being told that it is taken.
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.max_pings_without_data", 0),
        # Connections that say nothing hold a descriptor each: nobody keeps one for longer than this.
        ("grpc.server_handshake_timeout_ms", round(1e3 * HANDSHAKE_TIMEOUT_S)),
        ("grpc.max_connection_idle_ms", round(1e3 * IDLE_TIMEOUT_S)),
    ]


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]
    """Whoever can connect may watch, so there is a limit to that: else watches would take the places of calls."""

    def __init__(self, max_watches: int = MAX_WATCHES) -> None:
        super().__init__()
        self._max_watches = max_watches
        self._watches = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._watches >= self._max_watches:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._max_watches} watch the health already")
        self._watches += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watches -= 1
