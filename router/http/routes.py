"""The paths of the HTTP front: each reads its request, calls the front door, and writes the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web

from engine.block_hash import unpack_tokens
from engine.errors import EngineError, RequestError
from kvrelay import _request
from kvrelay._assembly import GenerationAssembly
from kvrelay.types import Generation, Usage
from kvrelay.v1 import router_pb2
from router import metrics, validate
from router.choices import all_or_none
from router.client_stream import Emit
from router.config import RouterConfig
from router.front_door import FrontDoor
from router.http import generation
from router.http.bodies import BodyReader, Fields, kind_of
from router.http.errors import error_body, error_response
from router.http.generation import Api, CallLimits, GenerationCall
from router.http.shapes import Answer
from router.http.sse import EventStream
from router.registry import Registry
from router.served_model import ServedModel
from router.shedding import allowance
from router.telemetry import TraceHeaders
from router.tenants import Tenant

REQUEST_ID = "X-Request-Id"
ANSWERED_AS = web.RequestKey("request_id", str)
"""What `REQUEST_ID` of the answer is."""
TIMEOUT = "X-Request-Timeout"
TENANT = web.RequestKey("tenant", Tenant)
"""Of a request, once it is known who sent it."""
TOKEN_ID_BYTES, OTHER_BYTES = 16, 4096
"""In a body that is token ids: of each of them, and of what there is beside them."""
Generate: TypeAlias = Callable[[router_pb2.GenerateRequest, Emit], Coroutine[Any, Any, None]]
"""`FrontDoor.generate` for one tenant and one HTTP request."""
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Answered to anybody: for probes and scrapers. They name workers, and no tenant."""


class Routes:
    def __init__(
        self,
        config: RouterConfig,
        model: ServedModel,
        registry: Registry,
        front: FrontDoor,
        router_metrics: metrics.RouterMetrics,
    ) -> None:
        self._config = config
        self._model = model
        self._registry = registry
        self._front = front
        self._metrics = router_metrics
        self._bodies = BodyReader(config.max_request_bytes, config.body_timeout_s)
        self._since = int(time.time())

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{name:.+}", self.model)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.metrics)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "chat")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def model(self, request: web.Request) -> web.Response:
        validate.check_model(request.match_info["name"], self._model)
        return web.json_response(self._card())

    async def tokenize(self, request: web.Request) -> web.Response:
        with self._front.limits.hold(request[TENANT], 1):
            async with self._bodies.read(request, request[TENANT]) as body:
                message = self._to_tokenize(body)
            token_ids = unpack_tokens(await self._front.tokenize(message, _timeout_s(request)))
        return web.json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._model.max_model_len,
                "tokens": token_ids,
                "token_strs": None,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        longest = self._model.max_model_len
        with self._front.limits.hold(request[TENANT], 1):
            async with self._bodies.read(request, request[TENANT], OTHER_BYTES + TOKEN_ID_BYTES * longest) as body:
                validate.check_model(body.text("model"), self._model)
                token_ids = _request.check_token_ids("tokens", body.get("tokens"), longest)
        validate.check_token_ids("tokens", token_ids, self._model)
        return web.json_response({"prompt": self._model.tokenizer.decode(token_ids, skip_special_tokens=False)})

    async def health(self, request: web.Request) -> web.Response:
        """This process lives."""
        return web.json_response({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        """Whether requests can be served now."""
        if self._registry.is_ready():
            return web.json_response({"status": "ready"})
        reason = self._registry.why_no_decode_worker()
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": metrics.CONTENT_TYPE})

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._since,
            "owned_by": "kvrelay",
            "max_model_len": self._model.max_model_len,
        }

    def _to_tokenize(self, body: Fields) -> router_pb2.TokenizeRequest:
        for name in ("add_special_tokens", "add_generation_prompt"):
            if not body.flag(name, default=True):
                raise RequestError(name, "false is not supported")
        validate.check_model(body.text("model"), self._model)
        if body.get("messages") is not None:
            return _request.build_tokenize(None, generation.read_messages(body), "")
        return _request.build_tokenize(body.text("prompt"), None, "")

    async def _generate(self, request: web.Request, api: Api) -> web.StreamResponse:
        tenant = request[TENANT]
        request_id = request.headers.get(REQUEST_ID) or request_id_of(request)
        names: dict[str, str] = {}
        try:
            call, model = await self._read_call(request, request_id, api, names)
            answer = Answer(call, self._model.tokenizer, request_id, model, int(time.time()))
            headers = TraceHeaders(request.headers.get("traceparent", ""), request.headers.get("tracestate", ""))
            generate = partial(self._front.generate, tenant, timeout_s=call.timeout_s, headers=headers)
            if call.stream:
                stream = EventStream(request, self._config.last_word_s)
                return await self._stream(generate, call, answer, stream, names)
            return web.json_response(answer.whole(await self._collect(generate, call)))
        except EngineError as error:
            return error_response(error, self._config.retry_after_s, names)

    async def _read_call(
        self, request: web.Request, request_id: str, api: Api, names: dict[str, str]
    ) -> tuple[GenerationCall, str]:
        """The call, and what its client calls the model; nothing of the body is kept. Fills `names`, for errors."""
        read = generation.read_chat if api == "chat" else generation.read_completions
        async with self._bodies.read(request, request[TENANT]) as body:
            names |= generation.names_of(api, body)
            call = read(body, request_id, _timeout_s(request), self._limits(request[TENANT]))
            return call, body.text("model") or self._model.name

    def _limits(self, tenant: Tenant) -> CallLimits:
        return CallLimits(
            max_model_len=self._model.max_model_len,
            max_n=self._config.max_n,
            max_requests=max(1, int(self._config.max_live_requests * allowance(tenant.best_priority))),
            max_outputs=tenant.max_concurrent_requests,
        )

    async def _collect(self, generate: Generate, call: GenerationCall) -> list[Generation]:
        assemblies = [GenerationAssembly(call.n) for _ in call.messages]

        def into(assembly: GenerationAssembly) -> Emit:
            async def emit(event: router_pb2.GenerateResponse) -> None:
                assembly.feed(event)

            return emit

        await all_or_none(
            generate(message, into(assembly)) for message, assembly in zip(call.messages, assemblies, strict=True)
        )
        return [assembly.result for assembly in assemblies]

    async def _stream(
        self, generate: Generate, call: GenerationCall, answer: Answer, stream: EventStream, names: Mapping[str, str]
    ) -> web.StreamResponse:
        usages = [[Usage(0, 0, 0)] * call.n for _ in call.messages]
        try:
            await all_or_none(
                generate(message, _chunks(answer, stream, number, usages[number]))
                for number, message in enumerate(call.messages)
            )
            if call.include_usage:
                await stream.send(answer.usage(usages))
            await stream.done()
        except EngineError as error:
            if not stream.begun:
                raise
            await stream.fail(error_body(error, names))
        return stream.response


def request_id_of(request: web.Request) -> str:
    """Of an answer, whatever it is: the client's, if that can be one, or a new one. Always the same for one request."""
    if ANSWERED_AS not in request:
        request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
        try:
            validate.check_request_id(request_id)
        except RequestError:
            request_id = uuid.uuid4().hex
        request[ANSWERED_AS] = request_id
    return request[ANSWERED_AS]


def _chunks(answer: Answer, stream: EventStream, prompt: int, usages: list[Usage]) -> Emit:
    """Writes what comes of one prompt as chunks, and notes the usage of each choice."""
    opened: set[int] = set()

    async def emit(event: router_pb2.GenerateResponse) -> None:
        if event.HasField("tokens"):
            tokens = event.tokens
            opening = None
            if tokens.choice not in opened:
                opened.add(tokens.choice)
                opening = answer.opening(prompt, tokens.choice)
            await stream.send(opening, answer.piece(prompt, tokens))
        elif event.HasField("finished"):
            usages[event.finished.choice] = Usage.from_proto(event.finished.usage)
            await stream.send(answer.closing(prompt, event.finished))

    return emit


def _timeout_s(request: web.Request) -> float | None:
    """Seconds that the client gives the request, from `?timeout=` or the header; None: the router's default."""
    text = request.query.get("timeout") or request.headers.get(TIMEOUT)
    if text is None:
        return None
    try:
        return _request.check_timeout(float(text))
    except (ValueError, RequestError):
        raise RequestError(
            "timeout", f"must be seconds in (0, {_request.MAX_TIMEOUT_S:.0f}], got {kind_of(text)}"
        ) from None
