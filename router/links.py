"""Owns the account of what passed between pairs of workers, as finished requests tell it; on the event loop only.

The routers of a cluster each tell of their own requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from prometheus_client.core import CounterMetricFamily, Metric

from kvrelay.v1 import router_pb2

MAX_LINKS = 1024
"""Kept; beyond it the one that was used longest ago is forgotten."""


@dataclass(slots=True)
class LinkUse:
    """From one prefill to one decode worker, over one transport. Sums since the router's start."""

    prefill_worker: str
    decode_worker: str
    transport: str
    """Empty: no block has come yet."""
    hand_overs: int = 0
    """Requests whose KV was asked for."""
    blocks: int = 0
    num_bytes: int = 0
    transfer_us: int = 0
    exposed_us: int = 0
    """Of it, what the second token waited for; the rest was hidden behind computing."""
    failed: int = 0
    """Hand-overs that left prompt tokens to be computed again."""
    last_error: str = ""
    """Of the last one that failed: the class."""


class LinkAccount:
    def __init__(self, capacity: int = MAX_LINKS) -> None:
        self._capacity = capacity
        self._links: OrderedDict[tuple[str, str, str], LinkUse] = OrderedDict()

    def note(self, finished: router_pb2.Finished) -> None:
        """What came of one output. Counts nothing where no KV was asked for."""
        route = finished.route
        if not route.prefill_worker or not (route.blocks_sent or route.transfer_error):
            return
        key = (route.prefill_worker, route.decode_worker, route.transport)
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = LinkUse(*key)
            if len(self._links) > self._capacity:
                self._links.popitem(last=False)
        self._links.move_to_end(key)
        link.hand_overs += 1
        link.blocks += route.blocks_adopted
        link.num_bytes += route.bytes_sent
        link.transfer_us += route.transfer_us
        link.exposed_us += exposed_us(finished.waterfall)
        if route.transfer_error:
            link.failed += 1
            link.last_error = route.transfer_error.partition(":")[0]

    def __len__(self) -> int:
        return len(self._links)

    def newest(self, limit: int) -> list[LinkUse]:
        """Those that were used last, as they are now, by the names of their workers."""
        newest = [replace(link) for link in list(self._links.values())[-limit:]]
        return sorted(newest, key=lambda link: (link.prefill_worker, link.decode_worker, link.transport))

    def families(self) -> Iterator[Metric]:
        labels = ["prefill", "decode", "transport"]
        done = CounterMetricFamily("kvrelay_kv_transfers", "Requests whose KV was asked for.", labels=labels)
        failed = CounterMetricFamily("kvrelay_kv_transfers_failed", "Of these, in part computed again.", labels=labels)
        blocks = CounterMetricFamily("kvrelay_kv_transfer_blocks", "Adopted.", labels=labels)
        size = CounterMetricFamily("kvrelay_kv_transfer_bytes", "Received.", labels=labels)
        for key, link in self._links.items():
            done.add_metric(key, link.hand_overs)
            failed.add_metric(key, link.failed)
            blocks.add_metric(key, link.blocks)
            size.add_metric(key, link.num_bytes)
        yield from (done, failed, blocks, size)


def exposed_us(waterfall: router_pb2.Waterfall) -> int:
    """Of the wait for the second token, the part that was waiting for KV."""
    return sum(part.duration_us for part in waterfall.after_first if part.name == "transfer")
