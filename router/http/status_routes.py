"""`/`, `/status.json` and the page's files. Collects what the page shows, and lets in only who may call Admin."""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import json
import math
import time
from collections.abc import Callable

from aiohttp import web

from engine.errors import EngineError, RequestError, Unauthenticated
from kvrelay._status import status_of
from kvrelay.types import ClusterStatus, Explanation
from router.admission import LiveRequest
from router.audit import AuditLog
from router.dispatch import Dispatcher
from router.explain import RUNNING, RequestRecord
from router.http.errors import error_response
from router.http.routes import request_id_of
from router.http.status_page import (
    MAX_LINKS,
    MAX_LIVE,
    MAX_RECENT,
    MAX_WORKERS,
    STATIC,
    LiveRow,
    StatusDocument,
    StatusPage,
)
from router.metrics import RouterMetrics
from router.status import StatusReader
from router.tenants import Tenants

PATHS = frozenset({"/", "/status.json"})
"""They ask for a key themselves: a browser can only send it as a password."""
FILES = {"/static/status.css": "text/css", "/static/status.js": "text/javascript"}
"""The same for everybody."""
FRESH_S = 1.0
"""However many look, the page is made once in this time."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
MAX_KEPT = 8
"""Pages made lately, each of another request."""


class StatusRoutes:
    """On the event loop."""

    def __init__(
        self,
        model: str,
        tenants: Tenants,
        status: StatusReader,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        audit: AuditLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._tenants = tenants
        self._status = status
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._audit = audit
        self._clock = clock
        self._page = StatusPage()
        self._files = {path: (STATIC / path.rpartition("/")[2]).read_bytes() for path in FILES}
        self._making = asyncio.Lock()
        self._made: dict[tuple[str, str], tuple[float, bytes]] = {}
        """By what it is and the request that is shown: when, and what."""

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self.page)
        app.router.add_get("/status.json", self.document)
        for path in FILES:
            app.router.add_get(path, self.file)

    async def page(self, request: web.Request) -> web.Response:
        """The whole page; with `?part=main` what a refresh replaces, with `?request=ID` with that one's waterfall."""
        if request.query.get("part") == "main":
            return await self._answer(request, "main", self._page.main)
        return await self._answer(request, "page", self._page.whole)

    async def document(self, request: web.Request) -> web.Response:
        return await self._answer(request, "json", _to_json)

    async def file(self, request: web.Request) -> web.Response:
        kind, body = FILES[request.path], self._files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers={"Cache-Control": "max-age=300"})

    async def _answer(self, request: web.Request, what: str, make: Callable[[StatusDocument], str]) -> web.Response:
        who, outcome = "unknown", "FAULT"
        try:
            tenant = self._tenants.identify(authorization_of(request))
            who = tenant.name
            tenant.check_admin()
            body = await self._fresh(what, request.query.get("request", ""), make)
            outcome = "OK"
        except Unauthenticated as error:
            outcome = status_of(error).name
            response = error_response(error, 0.0)
            response.headers["WWW-Authenticate"] = 'Basic realm="kvrelay, key as password", charset="UTF-8"'
            return response
        except EngineError as error:
            outcome = status_of(error).name
            raise
        finally:
            if what != "main" or outcome != "OK":  # a page that is open asks every two seconds
                self._audit.record(
                    request_id=request_id_of(request),
                    identity=who,
                    peer=request.remote or "",
                    call=f"GET {request.path}",
                    result=outcome,
                )
        kind = "application/json" if what == "json" else "text/html"
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    async def _fresh(self, what: str, request_id: str, make: Callable[[StatusDocument], str]) -> bytes:
        """On a thread, as a page of a large cluster takes some milliseconds; one at a time, so who waits finds it."""
        key = (what, request_id)
        async with self._making:
            at, body = self._made.pop(key, (-math.inf, b""))
            if self._clock() - at >= FRESH_S:
                at, document = self._clock(), self.collect(request_id)
                body = (await asyncio.to_thread(make, document)).encode()
            self._made[key] = (at, body)
            if len(self._made) > MAX_KEPT:
                del self._made[next(iter(self._made))]
        return body

    def collect(self, request_id: str = "") -> StatusDocument:
        """Now. `request_id` is the one whose waterfall is shown; without it, or if it is not known any more, the
        newest that has one."""
        history, admission = self._dispatcher.history, self._dispatcher.admission
        status = ClusterStatus.from_proto(self._status.read())
        workers, live = status.workers, admission.requests(MAX_LIVE)
        recent = [told for told in map(_told, history.recent(MAX_RECENT + MAX_LIVE)) if told.outcome != RUNNING]
        links = self._metrics.links
        return StatusDocument(
            model=self._model,
            generation_tokens=self._metrics.generation_tokens,
            status=dataclasses.replace(status, workers=workers[:MAX_WORKERS]),
            links=links.newest(MAX_LINKS),
            live=[self._live_row(each) for each in live],
            recent=recent[:MAX_RECENT],
            request=self._shown(request_id) or next((each for each in recent if each.waterfall.ttft_us), None),
            errors=dict(sorted(self._metrics.errors.items())),
            omitted={
                "workers": max(0, len(workers) - MAX_WORKERS),
                "links": max(0, len(links) - MAX_LINKS),
                "live": admission.live - len(live),
            },
        )

    def _shown(self, request_id: str) -> Explanation | None:
        try:
            return _told(self._dispatcher.history.find(request_id)) if request_id else None
        except RequestError:
            return None

    def _live_row(self, live: LiveRequest) -> LiveRow:
        try:
            placement = self._dispatcher.history.find(live.request_id).placement
        except RequestError:  # more are live than are remembered
            placement = None
        return LiveRow(
            request_id=live.request_id,
            age_s=self._clock() - live.since,
            remaining_s=live.remaining_s(),
            prefill_worker="" if placement is None else placement.prefill_worker or placement.decode_worker,
            decode_worker="" if placement is None else placement.decode_worker,
        )


def authorization_of(request: web.Request) -> str | None:
    """A browser asks for name and password, and sends them as `Basic`: the password is the key."""
    header = request.headers.get("Authorization")
    kind, _, value = (header or "").partition(" ")
    if kind.lower() != "basic":
        return header
    try:
        decoded = base64.b64decode(value.strip(), validate=True).decode("utf-8", "surrogateescape")
    except (binascii.Error, ValueError):
        return None
    return f"Bearer {decoded.partition(':')[2]}"


def _told(record: RequestRecord) -> Explanation:
    """Without what may quote the client."""
    told = Explanation.from_proto(record.to_proto(max_pairs=1))
    if told.outcome.startswith("INVALID_ARGUMENT"):
        told = dataclasses.replace(told, outcome="INVALID_ARGUMENT")
    return told


def _to_json(document: StatusDocument) -> str:
    return json.dumps(dataclasses.asdict(document), separators=(",", ":"))
