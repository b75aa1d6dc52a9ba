"""Which requests are live on a worker, and whose they are. Knows nothing of what a role does with them."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from engine.errors import QueueFull
from worker.session import MalformedRequest, Session


class Live(Protocol):
    """A role's record of one request."""

    @property
    def key(self) -> str: ...
    @property
    def session(self) -> Session: ...
    @property
    def request_id(self) -> str: ...
    @property
    def traceparent(self) -> str:
        """W3C trace context of the request; empty if it is not traced."""


T = TypeVar("T", bound=Live)


class LiveRequests(Generic[T]):
    """The records of all live requests of one worker.

    Invariant: a record is found by its key, and by its session and request id, until it is removed. Two routers may use
    the same request id, so the engine and the links know a request by its key, which is unique and cannot be guessed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: dict[str, T] = {}
        self._by_request: dict[tuple[Session, str], T] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._by_key.values()))

    def new_key(self) -> str:
        return f"{next(self._numbers)}-{secrets.token_hex(8)}"

    def check_new(self, session: Session, request_id: str) -> None:
        """Raises `MalformedRequest` if the router uses the id already, `QueueFull` if the worker holds its limit."""
        if (session, request_id) in self._by_request:
            raise MalformedRequest(f"request_id {request_id!r} is in use on this session")
        if len(self._by_key) >= self._limit:
            raise QueueFull(f"this worker holds {self._limit} requests, its limit")

    def add(self, record: T) -> None:
        self._by_key[record.key] = record
        self._by_request[record.session, record.request_id] = record
        self._empty.clear()

    def remove(self, record: T) -> None:
        del self._by_key[record.key]
        del self._by_request[record.session, record.request_id]
        if not self._by_key:
            self._empty.set()

    def by_key(self, key: str) -> T | None:
        return self._by_key.get(key)

    def by_request(self, session: Session, request_id: str) -> T | None:
        return self._by_request.get((session, request_id))

    def of(self, session: Session) -> list[T]:
        return [record for record in self._by_key.values() if record.session is session]

    async def wait_empty(self) -> None:
        await self._empty.wait()
