"""Owns the set of live requests: how many there may be, and how one is ended from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import islice

from engine.errors import DeadlineExceeded, EngineError, QueueFull, RequestCancelled, RequestError
from kvrelay._logs import log_fields
from router.shedding import allowance


class LiveRequest:
    """A request between its admission and its terminal status. Client cancel, deadline and `abort` are one event."""

    def __init__(self, request_id: str, since: float = 0.0, traceparent: str = "") -> None:
        """`since`: when it was admitted, on the clock of whoever admits."""
        self.request_id = request_id
        self.since = since
        self.traceparent = traceparent
        """Of its trace, for workers."""
        self._scope: asyncio.Timeout | None = None
        self._timeout_s = 0.0
        self._cause: EngineError | None = None

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[None]:
        """Run the body until it is done, the time is over (`DeadlineExceeded`), or `abort` is called (its error)."""
        self._timeout_s = timeout_s
        try:
            async with asyncio.timeout(timeout_s) as scope:
                self._scope = scope
                if self._cause is not None:
                    raise self._cause
                yield
        except TimeoutError:
            if self._scope is None or not self._scope.expired():
                raise
            raise self._cause or DeadlineExceeded(f"the request's {timeout_s:g} s are over") from None

    def abort(self, error: EngineError) -> None:
        """End the body of `within` with `error` where it waits next. Only the first call counts."""
        if self._cause is None:
            self._cause = error
            if self._scope is not None and not self._scope.expired():
                self._scope.reschedule(asyncio.get_running_loop().time())

    def remaining_s(self) -> float:
        """Of the deadline; for use inside `within`."""
        when = self._scope.when() if self._scope is not None else None
        return self._timeout_s if when is None else max(0.0, when - asyncio.get_running_loop().time())


class Admission:
    """There is no queue here: who is let in waits at the workers, where priority and tenant decide whose turn it is.

    Invariant: a request id is in `_live` exactly while its `admit` block runs; nothing else counts requests.
    """

    def __init__(self, max_live: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_live` is for priority 0: each priority has its allowance of it, at least one place."""
        self._max_live = max_live
        self._clock = clock
        self._live: dict[str, LiveRequest] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    def requests(self, limit: int) -> list[LiveRequest]:
        """The `limit` that are live for longest, oldest first."""
        return list(islice(self._live.values(), limit))

    @contextmanager
    def admit(self, request_id: str, priority: int = 0, traceparent: str = "") -> Iterator[LiveRequest]:
        """Hold a place for `request_id`. Raises `QueueFull`, or `RequestError` if the id is live already."""
        if request_id in self._live:
            raise RequestError("request_id", f"{request_id!r} is live already; ids are unique while they are")
        limit = max(1, int(self._max_live * allowance(priority)))
        if len(self._live) >= limit:
            raise QueueFull(
                f"{len(self._live)} requests are live; the limit of priority {priority} is {limit}; try again later"
            )
        request = self._live[request_id] = LiveRequest(request_id, self._clock(), traceparent)
        try:
            with log_fields(request_id=request_id):
                yield request
        finally:
            del self._live[request_id]

    def cancel(self, request_id: str) -> bool:
        """End `request_id` with `RequestCancelled`. False: it is not live, which is no error."""
        request = self._live.get(request_id)
        if request is None:
            return False
        request.abort(RequestCancelled(f"{request_id} was cancelled"))
        return True

    def end_all(self, error: EngineError) -> None:
        """End every live request with `error`."""
        for request in self._live.values():
            request.abort(error)

    def check_idle(self) -> None:
        assert not self._live, f"live requests were left: {sorted(self._live)}"
