"""What a router counts and sees of its workers, as Prometheus families. Owns the counts; on the event loop only."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from engine.block_hash import TOKEN_BYTES
from engine.errors import EngineError
from kvrelay._wire import finish_reason_from_proto
from kvrelay.v1 import router_pb2
from router.admission import Admission
from router.explain import History
from router.links import LinkAccount, exposed_us
from router.placement_metrics import placement_families
from router.registry import Registry
from router.worker_client import WorkerState

CONTENT_TYPE = CONTENT_TYPE_LATEST
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
_E2E_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)


class Histogram:
    """Without locks: one thread observes and reads."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class RouterMetrics(Collector):
    def __init__(
        self,
        admission: Admission,
        registry: Registry,
        history: History,
        trace_counts: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`trace_counts`: spans by what became of them; nothing where nothing is traced."""
        self._trace_counts = trace_counts
        self._admission = admission
        self._history = history
        self._workers = registry
        self._ttft, self._itl, self._e2e = Histogram(_TTFT_S), Histogram(_ITL_S), Histogram(_E2E_S)
        self._tpot = Histogram(_TPOT_S)
        self._stages = {name: Histogram(_STAGE_S) for name in _STAGES}
        self.links = LinkAccount()
        self._finished: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._answered: Counter[tuple[str, int]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        """Prompt tokens by the role of the worker whose cache had them."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @contextmanager
    def call(self, now: float) -> Iterator[CallMeter]:
        """The account of one call. An error that ends the block is counted by its class."""
        try:
            yield CallMeter(self, now)
        except EngineError as error:
            self._failed[type(error).__name__] += 1
            raise
        except asyncio.CancelledError:
            self._failed["RequestCancelled"] += 1
            raise

    def answered(self, path: str, status: int) -> None:
        """One HTTP request; `path` is one of ours, or "unknown"."""
        self._answered[path, status] += 1

    @property
    def errors(self) -> Mapping[str, int]:
        """Calls that did not end well, by class."""
        return self._failed

    @property
    def generation_tokens(self) -> int:
        """Handed to clients so far."""
        return self._tokens["generation_tokens"]

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield self._ttft.family("kvrelay_time_to_first_token_seconds", "From a call's receipt to its first token.")
        yield self._itl.family("kvrelay_inter_token_latency_seconds", "Between tokens of one output.")
        yield self._e2e.family(
            "kvrelay_e2e_request_latency_seconds", "From receipt to last word, of calls that succeeded."
        )
        yield self._tpot.family(
            "kvrelay_request_time_per_output_token_seconds", "Of one output: its time after the first token, by token."
        )
        for name, text in _STAGES.items():
            yield self._stages[name].family(f"kvrelay_{name}_seconds", text)
        yield _counter("kvrelay_request_success", "Outputs that finished.", "finished_reason", self._finished)
        yield _counter("kvrelay_request_errors", "Calls that ended otherwise, by class.", "error", self._failed)
        answered = CounterMetricFamily("kvrelay_http_requests", "Answered.", labels=["path", "status"])
        for (path, status), count in self._answered.items():
            answered.add_metric([path, str(status)], count)
        yield answered
        for name, text in _TOKEN_COUNTERS.items():
            yield CounterMetricFamily(f"kvrelay_{name}", text, value=self._tokens[name])
        yield _counter("kvrelay_prefix_cache_hits", "Of these, found, by role of who had them.", "source", self._hits)
        yield _counter("kvrelay_trace_spans", "By what became of them.", "outcome", Counter(self._trace_counts()))
        yield from self.links.families()
        yield GaugeMetricFamily("kvrelay_requests_live", "Calls that this router serves.", value=self._admission.live)
        yield from self._worker_families()
        yield from placement_families(self._workers, self._history)

    def _worker_families(self) -> Iterator[Metric]:
        labels = ["worker", "role"]
        up = GaugeMetricFamily("kvrelay_worker_ready", "1 while the router can use it.", labels=labels)
        running = GaugeMetricFamily("kvrelay_num_requests_running", "That compute or decode.", labels=labels)
        waiting = GaugeMetricFamily("kvrelay_num_requests_waiting", "For blocks or for a turn.", labels=labels)
        blocks = GaugeMetricFamily("kvrelay_kv_blocks", "Of the pool, by state.", labels=[*labels, "state"])
        errors = CounterMetricFamily("kvrelay_worker_errors", "Typed errors.", labels=[*labels, "error"])
        told = {name: family(f"kvrelay_worker_{name}", text, labels=labels) for name, (family, text) in _LOADS.items()}
        for client in self._workers.workers:
            if client.peer is None:
                continue
            key = [client.peer.worker_id, client.peer.role]
            up.add_metric(key, float(client.state is WorkerState.READY))
            if client.session is None:
                continue
            load = client.session.load
            running.add_metric(key, load.running)
            waiting.add_metric(key, load.waiting)
            for state in ("free", "cached", "owned", "leased", "quarantined"):
                blocks.add_metric([*key, state], getattr(load, f"blocks_{state}"))
            for error, count in load.errors.items():
                errors.add_metric([*key, error], count)
            for name, family in told.items():
                family.add_metric(key, getattr(load, name))
        yield from (up, running, waiting, blocks, errors, *told.values())

    def _count_finished(self, finished: router_pb2.Finished) -> None:
        usage = finished.usage
        self._finished[finish_reason_from_proto(finished.reason) or "unknown"] += 1
        self._tokens["kv_bytes_sent"] += finished.route.bytes_sent
        self._tokens["request_resumes"] += max(0, finished.route.attempts - 1)
        self.links.note(finished)
        self._observe_stages(finished)
        if finished.choice == 0:  # the choices of a call share the prompt
            self._tokens["prefix_cache_queries"] += usage.prompt_tokens
            at_decode = min(finished.route.decode_cached_tokens, usage.cached_tokens)
            self._hits["decode"] += at_decode
            self._hits["prefill"] += usage.cached_tokens - at_decode

    def _observe_stages(self, finished: router_pb2.Finished) -> None:
        waterfall, count = finished.waterfall, finished.usage.completion_tokens
        spent = {part.name: part.duration_us / 1e6 for part in waterfall.parts}
        self._stages["request_queue_time"].observe(spent.get("reserve_wait", 0.0) + spent.get("prefill_queue", 0.0))
        computed_s = spent.get("prefill_compute", 0.0) + spent.get("decode_prefill", 0.0)
        self._stages["request_prefill_time"].observe(computed_s)
        if waterfall.decode_tokens_per_s > 0:
            self._tpot.observe(1 / waterfall.decode_tokens_per_s)
            self._stages["request_decode_time"].observe((count - 1) / waterfall.decode_tokens_per_s)
        if finished.route.blocks_sent:
            self._stages["kv_transfer_time"].observe(finished.route.transfer_us / 1e6)
            self._stages["kv_transfer_exposed"].observe(exposed_us(waterfall) / 1e6)


_TOKEN_COUNTERS = {
    "prompt_tokens": "Prompt tokens of calls that were accepted.",
    "generation_tokens": "Output tokens handed to clients.",
    "prefix_cache_queries": "Prompt tokens that were looked up in prefix caches.",
    "kv_bytes_sent": "KV that went from prefill to decode workers.",
    "request_resumes": "Placements after the first, because a worker was lost or refused.",
}


_STAGES = {
    "request_queue_time": "Of one output: waiting for blocks and for a turn, at both workers.",
    "request_prefill_time": "Of one output: computing its prompt, where a worker did.",
    "request_decode_time": "Of one output: from its first to its last token.",
    "kv_transfer_time": "Of one output whose KV moved: first byte of the first block to the last block's adoption.",
    "kv_transfer_exposed": "Of it, what the second token waited for; the rest was hidden behind computing.",
}
_LOADS: dict[str, tuple[type[CounterMetricFamily] | type[GaugeMetricFamily], str]] = {
    "preemptions": (CounterMetricFamily, "Requests that gave their blocks to others, since the worker's start."),
    "preemptions_swapped": (CounterMetricFamily, "Of these, with the KV kept in host memory."),
    "blocks_evicted": (CounterMetricFamily, "Cached blocks given up."),
    "host_blocks_restored": (CounterMetricFamily, "Blocks copied back from host memory."),
    "host_blocks_used": (GaugeMetricFamily, "Blocks in host memory."),
    "blocks_lent": (GaugeMetricFamily, "Owned blocks that decode workers may read where they are."),
    "waiting_tokens": (GaugeMetricFamily, "Prompt tokens still to be computed."),
    "prefill_tokens_per_s": (GaugeMetricFamily, "Measured; 0 while unknown."),
    "decode_step_ms": (GaugeMetricFamily, "Measured; 0 while unknown."),
    "resident_bytes": (GaugeMetricFamily, "Memory of the process."),
}
"""Fields of `Load` that are exported under their own names."""


class CallMeter:
    def __init__(self, metrics: RouterMetrics, received: float) -> None:
        self._metrics = metrics
        self._received = received
        self._first = True
        self._last: dict[int, float] = {}
        """When the newest token of each choice was handed over."""

    def sent(self, event: router_pb2.GenerateResponse, now: float) -> int:
        """`event` was handed to the client's connection. Returns its tokens: of the prompt, or of the output."""
        if event.HasField("tokens"):
            return self._tokens(event.tokens, now)
        if event.HasField("finished"):
            self._metrics._count_finished(event.finished)
        elif event.HasField("accepted"):
            self._metrics._tokens["prompt_tokens"] += event.accepted.prompt_tokens
        return event.accepted.prompt_tokens

    def finished(self, now: float) -> None:
        """The call ended well."""
        self._metrics._e2e.observe(now - self._received)

    def _tokens(self, tokens: router_pb2.Tokens, now: float) -> int:
        count = len(tokens.token_ids) // TOKEN_BYTES
        before = self._last.get(tokens.choice)
        self._last[tokens.choice] = now
        self._metrics._tokens["generation_tokens"] += count
        if self._first:
            self._first = False
            self._metrics._ttft.observe(now - self._received)
        if before is not None:
            self._metrics._itl.observe((now - before) / count, count)
        elif count > 1:
            self._metrics._itl.observe(0.0, count - 1)
        return count


def _counter(name: str, text: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, count in counts.items():
        family.add_metric([key], count)
    return family
