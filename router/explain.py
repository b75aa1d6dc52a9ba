"""Owns the memory of recent requests: how each was placed, where it ran, how long its parts took, how it ended; and the
account of how far estimates were from what happened."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

from engine.errors import EngineError, RequestCancelled, RequestError
from kvrelay._status import status_of
from kvrelay.v1 import router_pb2
from router.policy import Placement, PricedPair
from router.validate import shortened

MAX_PAIRS = 64
"""Kept of each placement."""
RUNNING = "running"


@dataclass(slots=True)
class RequestRecord:
    """Filled in while the request lives. Of several placements, the last one stays."""

    request_id: str
    placement: Placement | None = None
    actual_ms: Mapping[str, float] = field(default_factory=dict)
    """What the terms of the chosen pair's price came to."""
    found_cached_tokens: int | None = None
    """At the worker that computed the prompt."""
    route: router_pb2.Route = field(default_factory=router_pb2.Route)
    waterfall: router_pb2.Waterfall = field(default_factory=router_pb2.Waterfall)
    outcome: str = RUNNING

    def placed(self, placement: Placement) -> None:
        self.placement, self.actual_ms, self.found_cached_tokens = placement, {}, None

    def to_proto(self, max_pairs: int = MAX_PAIRS) -> router_pb2.ExplainResponse:
        pairs = self.placement.considered(max_pairs) if self.placement is not None else []
        considered = [_pair_to_proto(pair) for pair in pairs]
        for term in considered[0].terms if considered else ():
            if term.name in self.actual_ms:
                term.actual_ms = self.actual_ms[term.name]
        if considered and self.found_cached_tokens is not None:
            considered[0].found_cached_tokens = self.found_cached_tokens
        return router_pb2.ExplainResponse(
            request_id=self.request_id,
            considered=considered,
            route=self.route,
            waterfall=self.waterfall,
            outcome=self.outcome,
        )


def _pair_to_proto(pair: PricedPair) -> router_pb2.PricedPair:
    return router_pb2.PricedPair(
        prefill_worker=pair.prefill_worker,
        decode_worker=pair.decode_worker,
        total_ms=pair.total_ms,
        terms=[router_pb2.PriceTerm(name=term.name, ms=term.ms) for term in pair.terms],
        affinity_ms=pair.affinity_ms,
        cached_tokens=pair.cached_tokens,
    )


@dataclass(slots=True)
class TermError:
    """Of one term: sums over the requests in which it was estimated and measured."""

    count: int = 0
    sum_ms: float = 0.0
    """Of estimate less actual."""
    sum_abs_ms: float = 0.0


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
        self.term_errors: dict[str, TermError] = {}
        """By the name of the term."""

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

    def settle(self, record: RequestRecord, actual_ms: Mapping[str, float], found_cached_tokens: int) -> None:
        """What came of the placement, beside what was expected. Terms that are not named were not measured."""
        if record.placement is None or not actual_ms:
            return
        record.actual_ms, record.found_cached_tokens = actual_ms, found_cached_tokens
        for term in record.placement.considered(1)[0].terms:
            if term.name in actual_ms:
                error = self.term_errors.setdefault(term.name, TermError())
                difference = term.ms - actual_ms[term.name]
                error.count += 1
                error.sum_ms += difference
                error.sum_abs_ms += abs(difference)

    def recent(self, limit: int, prefix: str = "") -> list[RequestRecord]:
        """The last requests with ids that begin with `prefix`, newest first."""
        newest_first = (record for record in reversed(self._records.values()) if record.request_id.startswith(prefix))
        return list(islice(newest_first, limit))

    def _count(self, error: EngineError) -> None:
        if isinstance(error, RequestError):
            self.requests_refused += 1
        elif isinstance(error, RequestCancelled):
            self.requests_cancelled += 1
        else:
            self.requests_failed += 1

    def find(self, request_id: str, named: str | None = None) -> RequestRecord:
        """Raises `RequestError` if there is none. `named`: as its tenant knows it, if that is another name."""
        record = self._records.get(request_id)
        if record is None:
            lacking = f"{shortened(named or request_id)} is not among the last {self._capacity} requests"
            raise RequestError("request_id", lacking)
        return record
