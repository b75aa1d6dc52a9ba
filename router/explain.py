"""Owns the memory of recent requests: how each was placed, where it ran, how long its parts took, how it ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.errors import EngineError, RequestCancelled, RequestError
from kvrelay._status import status_of
from kvrelay.v1 import router_pb2
from router.policy import PricedPair
from router.validate import shortened

MAX_PAIRS = 64
"""Kept of each placement."""
RUNNING = "running"


@dataclass(slots=True)
class RequestRecord:
    """Filled in while the request lives. Of several placements, the last one stays."""

    request_id: str
    considered: Sequence[PricedPair] = ()
    route: router_pb2.Route = field(default_factory=router_pb2.Route)
    waterfall: router_pb2.Waterfall = field(default_factory=router_pb2.Waterfall)
    outcome: str = RUNNING

    def placed(self, pairs: Sequence[PricedPair]) -> None:
        self.considered = tuple(pairs[:MAX_PAIRS])

    def to_proto(self) -> router_pb2.ExplainResponse:
        considered = [
            router_pb2.PricedPair(
                prefill_worker=pair.prefill_worker,
                decode_worker=pair.decode_worker,
                total_ms=pair.total_ms,
                terms=[router_pb2.PriceTerm(name=term.name, ms=term.ms) for term in pair.terms],
            )
            for pair in self.considered
        ]
        return router_pb2.ExplainResponse(
            request_id=self.request_id,
            considered=considered,
            route=self.route,
            waterfall=self.waterfall,
            outcome=self.outcome,
        )


class History:
    """The last `capacity` requests, by id; an id that is used again replaces its record."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self.requests_total = 0
        """Admitted; those that were shed or had a live id are not among them."""
        self.requests_failed = 0
        """Of these, ended by a fault, a lost worker, a lack of room or of time."""
        self.requests_cancelled = 0
        """Of these, ended by their client."""
        self.requests_refused = 0
        """Of these, ended because they could never be served."""

    @contextmanager
    def record(self, request_id: str) -> Iterator[RequestRecord]:
        """A record whose outcome is settled, whichever way the block is left."""
        record = RequestRecord(request_id)
        self._records.pop(request_id, None)
        self._records[request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)
        self.requests_total += 1
        finished = False
        try:
            yield record
            finished = True
        except EngineError as error:
            record.outcome = f"{status_of(error).name}: {error}"
            self._count(error)
            raise
        except asyncio.CancelledError:
            record.outcome = "CANCELLED: the client went away"
            self.requests_cancelled += 1
            raise
        finally:
            if not finished and record.outcome == RUNNING:
                record.outcome = "INTERNAL: a fault of the router; see its log"
                self.requests_failed += 1

    def _count(self, error: EngineError) -> None:
        if isinstance(error, RequestError):
            self.requests_refused += 1
        elif isinstance(error, RequestCancelled):
            self.requests_cancelled += 1
        else:
            self.requests_failed += 1

    def find(self, request_id: str) -> RequestRecord:
        record = self._records.get(request_id)
        if record is None:
            raise RequestError("request_id", f"{shortened(request_id)} is not among the last {self._capacity} requests")
        return record
