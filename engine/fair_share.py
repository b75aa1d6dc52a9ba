"""Whose turn it is: tenants' shares of the tokens, and the lines of waiting requests. Knows no blocks and no clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from engine.request import Request

_age = attrgetter("queue_number")


class TenantShares:
    """Tokens served to each tenant (scope) that has a live request. Who has the fewest is next.

    A tenant that comes (back) starts with the fewest that anybody has: being idle saves up no claim, and a debt is
    forgotten with the tenant's last request. So between two tenants that both keep waiting, the tokens served differ
    by no more than what one may have running at once.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, int] = {}
        self._num_live: Counter[bytes] = Counter()

    @property
    def served(self) -> Mapping[bytes, int]:
        return self._served

    def enter(self, scope: bytes) -> None:
        """One more request of this tenant is live."""
        if scope not in self._served:
            self._served[scope] = min(self._served.values(), default=0)
        self._num_live[scope] += 1

    def leave(self, scope: bytes) -> None:
        self._num_live[scope] -= 1
        if self._num_live[scope] == 0:
            del self._num_live[scope], self._served[scope]

    def charge(self, scope: bytes, num_tokens: int) -> None:
        self._served[scope] += num_tokens

    def check_integrity(self, live: Counter[bytes]) -> None:
        """`live`: requests of each tenant."""
        assert self._num_live == live
        assert self._served.keys() == live.keys()


@dataclass(slots=True)
class Line:
    """Waiting requests of one tenant and one priority, oldest first."""

    scope: bytes
    priority: int
    requests: list[Request] = field(default_factory=list)
    last_turn: float = -math.inf
    """When the scheduler last admitted one of them."""

    def level(self, first: Request, now: float, step_s: float) -> int:
        """Priority with which `first`, the next of this line, competes: one better for each `step_s` seconds without
        a turn."""
        waited = now - max(first.arrival, self.last_turn)
        return self.priority - max(0, int(waited / step_s))


class WaitingRequests:
    """All that wait, in a line for each tenant and priority; an empty line is forgotten."""

    def __init__(self) -> None:
        self._lines: dict[tuple[bytes, int], Line] = {}
        self._num_waiting: Counter[bytes] = Counter()
        """Requests of each tenant."""

    @property
    def lines(self) -> list[Line]:
        return list(self._lines.values())

    @property
    def num_tenants(self) -> int:
        return len(self._num_waiting)

    def num_of(self, scope: bytes) -> int:
        return self._num_waiting.get(scope, 0)

    def add(self, request: Request) -> None:
        """Before all of its line that were accepted later: a preempted request has its place back."""
        key = (request.scope, request.priority)
        line = self._lines.setdefault(key, Line(*key))
        insort(line.requests, request, key=_age)
        self._num_waiting[request.scope] += 1

    def remove(self, request: Request) -> None:
        key = (request.scope, request.priority)
        line = self._lines[key]
        del line.requests[bisect_left(line.requests, request.queue_number, key=_age)]
        if not line.requests:
            del self._lines[key]
        self._num_waiting[request.scope] -= 1
        if self._num_waiting[request.scope] == 0:
            del self._num_waiting[request.scope]

    def take_turn(self, request: Request, now: float) -> None:
        """Remove a request because it was admitted."""
        self._lines[request.scope, request.priority].last_turn = now
        self.remove(request)

    def __len__(self) -> int:
        return self._num_waiting.total()

    def __iter__(self) -> Iterator[Request]:
        for line in self._lines.values():
            yield from line.requests

    def check_integrity(self) -> None:
        for (scope, priority), line in self._lines.items():
            assert line.requests, "an empty line"
            assert all((r.scope, r.priority) == (scope, priority) for r in line.requests)
            assert line.requests == sorted(line.requests, key=_age), "a line is out of order"
        assert self._num_waiting == Counter(request.scope for request in self)
