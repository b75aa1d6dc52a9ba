"""Prefix index, staleness and prediction errors as Prometheus families."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.explain import History
from router.registry import Registry


def placement_families(registry: Registry, history: History) -> Iterator[Metric]:
    yield from _index_families(registry)
    yield from _worker_families(registry)
    yield from _error_families(history)


def _index_families(registry: Registry) -> Iterator[Metric]:
    stats = registry.index.stats()
    yield GaugeMetricFamily("kvrelay_prefix_index_keys", "Routing keys noted as resident.", value=stats.keys)
    yield GaugeMetricFamily(
        "kvrelay_prefix_index_speculative_keys", "Of dispatched work.", value=stats.speculative_keys
    )
    yield GaugeMetricFamily("kvrelay_prefix_index_bytes", "Estimated from above.", value=stats.num_bytes)
    yield GaugeMetricFamily("kvrelay_prefix_index_max_bytes", "The budget.", value=stats.max_bytes)
    yield CounterMetricFamily("kvrelay_prefix_index_evictions", "Keys dropped for want of room.", value=stats.evictions)


def _worker_families(registry: Registry) -> Iterator[Metric]:
    labels = ["worker", "role"]
    stale = GaugeMetricFamily(
        "kvrelay_prefix_index_staleness_seconds", "How old what is noted of a worker may be.", labels=labels
    )
    lists = CounterMetricFamily("kvrelay_prefix_index_lists", "Asked for, in this session.", labels=labels)
    faults = CounterMetricFamily("kvrelay_prefix_index_faults", "In this session, by kind.", labels=[*labels, "kind"])
    now = asyncio.get_running_loop().time()
    for client in registry.workers:
        session = client.session
        if session is None or session.blocks is None:
            continue
        key, blocks = [session.peer.worker_id, session.peer.role], session.blocks
        stale.add_metric(key, blocks.staleness_s(now))
        lists.add_metric(key, blocks.counts.lists)
        for kind in ("gaps", "repeats", "dropped", "differences"):
            faults.add_metric([*key, kind], getattr(blocks.counts, kind))
    yield from (stale, lists, faults)


def _error_families(history: History) -> Iterator[Metric]:
    count = CounterMetricFamily("kvrelay_price_terms", "Estimates that were compared with what came.", labels=["term"])
    total = GaugeMetricFamily(
        "kvrelay_price_error_milliseconds_sum", "Of estimate less actual, over all requests.", labels=["term"]
    )
    size = CounterMetricFamily(
        "kvrelay_price_absolute_error_milliseconds", "Of the difference, whatever its sign.", labels=["term"]
    )
    for name, error in history.term_errors.items():
        count.add_metric([name], error.count)
        total.add_metric([name], error.sum_ms)
        size.add_metric([name], error.sum_abs_ms)
    yield from (count, total, size)
