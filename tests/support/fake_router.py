"""A router without workers: a gRPC server on loopback whose answers are scripted by the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from engine.block_hash import pack_tokens
from engine.errors import EngineError
from kvrelay import _status
from kvrelay.v1 import common_pb2, router_pb2, router_pb2_grpc

Event = router_pb2.GenerateResponse
Script = Callable[["LiveCall"], Iterator[Event]]
WAIT_S = 30.0
"""A test that waits longer than this has failed."""

ROUTE = router_pb2.Route(
    prefill_worker="prefill-0",
    decode_worker="decode-0",
    attempts=1,
    blocks_computed=3,
    blocks_sent=2,
    blocks_adopted=2,
    blocks_cached=1,
    bytes_sent=3 * 1024 * 1024,
    transport="shm",
)
WATERFALL = router_pb2.Waterfall(
    parts=[router_pb2.Span(name="queue", duration_us=500), router_pb2.Span(name="prefill", duration_us=12_000)],
    ttft_us=12_500,
    after_first=[router_pb2.Span(name="first_decode_step", duration_us=700)],
    second_token_us=20_700,
    decode_tokens_per_s=48.5,
)
STATUS = router_pb2.StatusResponse(
    router_id="router-0",
    version="0.1.0",
    uptime_ms=61_000,
    live_requests=1,
    requests_total=7,
    requests_failed=2,
    requests_cancelled=1,
    requests_refused=3,
    workers=[
        router_pb2.WorkerStatus(
            worker_id="prefill-0",
            incarnation="a1",
            role="prefill",
            address="127.0.0.1:7001",
            state="ready",
            pid=4001,
            running=1,
            waiting=2,
            blocks_total=100,
            blocks_free=60,
            blocks_cached=30,
            blocks_owned=10,
            prefill_tokens_per_s=850.0,
            resident_bytes=512 * 1024 * 1024,
        ),
        router_pb2.WorkerStatus(
            worker_id="decode-0",
            role="decode",
            address="127.0.0.1:7002",
            state="lost",
            detail="no answer for 5 s",
            blocks_total=100,
            errors={"DigestMismatch": 3},
        ),
    ],
)


class LiveCall:
    """What a script sees of the call that it answers."""

    def __init__(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> None:
        self.request = request
        self.context = context
        self.over = threading.Event()
        """Set when the call ends, for whatever reason."""
        if not context.add_callback(self.over.set):
            self.over.set()

    def wait_until_over(self) -> None:
        assert self.over.wait(WAIT_S), "the client neither cancelled nor ran out of time"

    def fail(self, error: EngineError) -> NoReturn:
        abort(self.context, error)


def accepted(request_id: str = "request-1", prompt_tokens: int = 3) -> Event:
    return Event(accepted=router_pb2.Accepted(request_id=request_id, prompt_tokens=prompt_tokens))


def tokens(
    index: int,
    token_ids: Sequence[int],
    text: str,
    logprobs: Sequence[common_pb2.TokenLogprobs] = (),
    choice: int = 0,
) -> Event:
    packed = pack_tokens(token_ids)
    return Event(tokens=router_pb2.Tokens(index=index, token_ids=packed, text=text, logprobs=logprobs, choice=choice))


def finished(
    completion_tokens: int,
    text: str = "",
    reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_LENGTH,
    choice: int = 0,
) -> Event:
    usage = router_pb2.Usage(prompt_tokens=3, completion_tokens=completion_tokens, cached_tokens=1)
    return Event(
        finished=router_pb2.Finished(
            reason=reason, text=text, usage=usage, route=ROUTE, waterfall=WATERFALL, choice=choice
        )
    )


def answer(call: LiveCall) -> Iterator[Event]:
    """Three tokens of a German greeting, the umlaut split over two of them."""
    yield accepted(call.request.request_id or "request-1")
    yield tokens(0, [10], "Gr")
    yield tokens(1, [11], "")
    yield tokens(2, [12], "üße")
    yield finished(3, text=" ✓", reason=common_pb2.FINISH_REASON_STOP)


def events(*script: Event) -> Script:
    """A script that sends these and ends with status OK."""
    return lambda _: iter(script)


def abort(context: grpc.ServicerContext, error: EngineError) -> NoReturn:
    code, text, metadata = _status.abort_arguments(error)
    context.set_trailing_metadata(metadata)
    context.abort(code, text)
    raise AssertionError("abort returned")


class FakeRouter(router_pb2_grpc.RouterServicer, router_pb2_grpc.AdminServicer):
    """Answers Generate by `script` and the other calls with fixed values, or all of them with `error`.

    Every request is kept in `requests`; every Generate call that ended appears in `over`.
    """

    def __init__(self) -> None:
        self.address = ""
        self.script: Script = answer
        self.error: EngineError | None = None
        self.requests: list[Any] = []
        self.authorizations: list[str | bytes | None] = []
        """Of each request."""
        self.over: queue.SimpleQueue[LiveCall] = queue.SimpleQueue()

    def Generate(self, request: router_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Event]:
        self._received(request, context)
        call = LiveCall(request, context)
        context.add_callback(lambda: self.over.put(call))
        yield from self.script(call)

    def Cancel(self, request: router_pb2.CancelRequest, context: grpc.ServicerContext) -> router_pb2.CancelResponse:
        self._received(request, context)
        return router_pb2.CancelResponse(found=request.request_id == "request-1")

    def Tokenize(
        self, request: router_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> router_pb2.TokenizeResponse:
        self._received(request, context)
        return router_pb2.TokenizeResponse(token_ids=pack_tokens([5, 6, 70_000]))

    def Explain(self, request: router_pb2.ExplainRequest, context: grpc.ServicerContext) -> router_pb2.ExplainResponse:
        self._received(request, context)
        terms = [
            router_pb2.PriceTerm(name="queue", ms=1.5),
            router_pb2.PriceTerm(name="prefill", ms=10.0, actual_ms=12.25),
        ]
        pair = router_pb2.PricedPair(
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            total_ms=11.5,
            terms=terms,
            affinity_ms=2.5,
            cached_tokens=48,
            found_cached_tokens=32,
        )
        return router_pb2.ExplainResponse(
            request_id=request.request_id, considered=[pair], route=ROUTE, waterfall=WATERFALL, outcome="stop"
        )

    def ListRecent(
        self, request: router_pb2.ListRecentRequest, context: grpc.ServicerContext
    ) -> router_pb2.ListRecentResponse:
        self._received(request, context)
        return router_pb2.ListRecentResponse(
            requests=[
                self.Explain(router_pb2.ExplainRequest(request_id=f"request-{n}"), context)
                for n in range(request.limit)
            ]
        )

    def ListModels(
        self, request: router_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> router_pb2.ListModelsResponse:
        self._received(request, context)
        card = router_pb2.ModelCard(name="smollm2-135m", max_model_len=8192, fingerprint=b"\x01\x02")
        return router_pb2.ListModelsResponse(models=[card])

    def Status(self, request: router_pb2.StatusRequest, context: grpc.ServicerContext) -> router_pb2.StatusResponse:
        self._received(request, context)
        return STATUS

    def Scale(self, request: router_pb2.ScaleRequest, context: grpc.ServicerContext) -> router_pb2.ScaleResponse:
        self._received(request, context)
        return router_pb2.ScaleResponse(change=_under_way("scale"))

    def Drain(self, request: router_pb2.DrainRequest, context: grpc.ServicerContext) -> router_pb2.DrainResponse:
        self._received(request, context)
        return router_pb2.DrainResponse(change=_under_way("drain"))

    def Flip(self, request: router_pb2.FlipRequest, context: grpc.ServicerContext) -> router_pb2.FlipResponse:
        self._received(request, context)
        return router_pb2.FlipResponse(change=_under_way("flip"))

    def _received(self, request: Any, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        metadata = dict(context.invocation_metadata())
        self.authorizations.append(metadata.get("authorization"))
        if self.error is not None:
            abort(context, self.error)


def _under_way(order: str) -> router_pb2.ClusterChange:
    return router_pb2.ClusterChange(changed=True, lines=[f"{order} is under way"])


@contextmanager
def running_fake_router() -> Iterator[FakeRouter]:
    """A fake router that listens on loopback; leaving the block ends every call that is left."""
    router = FakeRouter()
    server = grpc.server(futures.ThreadPoolExecutor(4, thread_name_prefix="fake-router"))
    router_pb2_grpc.add_RouterServicer_to_server(router, server)
    router_pb2_grpc.add_AdminServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield router
    finally:
        server.stop(grace=None).wait()
