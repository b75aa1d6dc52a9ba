"""A handle to a running cluster, from any process: `cluster.connect("ray://head:10001")`, or a cluster of this machine.

Ray is asked only where the router is, and to pass orders on to whoever supervises the cluster; prompts, tokens and
answers go between this process and the router over gRPC and HTTP. Nothing but the standard library is imported before
`connect` is called, and Ray only for an address that needs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from engine.errors import RequestCancelled

if TYPE_CHECKING:
    from cluster.jobs.runner import Progress
    from kvrelay import Client, ClusterStatus, Generation, GenerationStream, Tls
    from kvrelay._request import GenerateOptions

ORDER_WAIT_S = 300.0
TIMEOUT_S = 30.0
"""For Ray to find the router, and to pass a word on."""


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """Where a router serves."""

    cluster: str
    address: str
    http_url: str


class Finder(Protocol):
    """The way to a cluster."""

    def place(self) -> RouterPlace:
        """Raises `UnavailableError` while there is no router."""

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have it carried out. Raises the `EngineError` with which it was refused."""

    def close(self) -> None: ...


def connect(
    address: str = "local",
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    tls: Tls | None = None,
    api_key: str | None = None,
) -> ClusterConnection:
    """A cluster's handle, to be closed, or used as a context manager.

    `address`: `ray://HOST:PORT` of a Ray client server; `auto` inside a Ray, as in a job; `local` for the cluster of
    this machine, which `name` chooses if several run. `name` of a cluster on a Ray: "default" unless given. `api_key`:
    that of the environment unless given.

    Raises `ConfigError` or `UnavailableError` if there is no such cluster.
    """
    from cluster.config import api_key as key_of_environment
    from cluster.finders import find
    from kvrelay import DEFAULT_TIMEOUT_S

    key = key_of_environment() if api_key is None else api_key
    timeout_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    return ClusterConnection(find(address, name), timeout_s=timeout_s, tls=tls, api_key=key)


class ClusterConnection:
    """Owns a client of the router, and the batches that were submitted through it. May be used from several threads."""

    def __init__(self, finder: Finder, *, timeout_s: float, tls: Tls | None, api_key: str | None) -> None:
        from kvrelay import Client

        self._finder = finder
        self._tls = tls
        self._batches: list[BatchHandle] = []
        with ExitStack() as failed:
            failed.callback(finder.close)
            self.place = finder.place()
            self.client: Client = Client(self.place.address, timeout_s=timeout_s, tls=tls, api_key=api_key)
            failed.pop_all()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """As `kvrelay.Client.generate`."""
        return self.client.generate(prompt, **options)

    def stream(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> GenerationStream:
        """As `kvrelay.Client.stream`."""
        return self.client.stream(prompt, **options)

    def status(self) -> ClusterStatus:
        return self.client.status()

    def submit_batch(self, source: str | Path, output: str | Path, **limits: Any) -> BatchHandle:
        """Begin to answer a file in OpenAI's batch format; see `kvrelay batch`. It runs on a thread of this process,
        and goes on where it was if it is submitted again. `limits` as in `cluster.jobs.batch.BatchJob`."""
        from cluster.jobs.batch import BatchJob

        ca_file = self._tls.ca_file if self._tls is not None else None
        job = BatchJob(
            source=Path(source), output=Path(output), base_url=self.place.http_url, ca_file=ca_file, **limits
        )
        handle = BatchHandle(job.run)
        self._batches.append(handle)
        return handle

    def scale(self, *, wait_s: float = ORDER_WAIT_S, **replicas: int) -> dict[str, Any]:
        """Have so many workers: `scale(prefill=2, decode=3)`. Returns what it took, once it is so.

        Raises `ConfigError` for what cannot be, `DeadlineExceeded` when `wait_s` is over and it still goes on.
        """
        return self._finder.order({"order": "scale", "replicas": replicas, "wait_s": wait_s})

    def drain(self, worker: str, *, wait_s: float = ORDER_WAIT_S) -> dict[str, Any]:
        """Take a worker out of service; see `kvrelay drain`. Raises as `scale` does."""
        return self._finder.order({"order": "drain", "worker": worker, "wait_s": wait_s})

    def flip(self, worker: str, *, wait_s: float = ORDER_WAIT_S) -> dict[str, Any]:
        """Give a worker the other role; see `kvrelay flip`. Raises as `scale` does."""
        return self._finder.order({"order": "flip", "worker": worker, "wait_s": wait_s})

    def close(self) -> None:
        """End batches that run, which can be submitted again, and the connections. Idempotent."""
        for batch in self._batches:
            batch.cancel()
        self._batches.clear()
        self.client.close()
        self._finder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RunsBatch(Protocol):
    async def __call__(self, tell: Any) -> Progress: ...


class BatchHandle:
    """A batch that runs on a thread of its own, for which the interpreter waits at its end unless it is cancelled."""

    def __init__(self, run: RunsBatch) -> None:
        self._run = run
        self._progress: Progress | None = None
        self._began = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Progress] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch")
        self._end = self._thread.submit(lambda: asyncio.run(self._main()))
        self._thread.shutdown(wait=False)
        self._began.wait()

    @property
    def progress(self) -> Progress | None:
        """After the last record; None before the first one."""
        return self._progress

    @property
    def done(self) -> bool:
        return self._end.done()

    def result(self, timeout_s: float | None = None) -> Progress:
        """Wait for the end. Raises the `EngineError` that ended it, `RequestCancelled` too, or `TimeoutError`."""
        return self._end.result(timeout_s)

    def cancel(self) -> None:
        """End it; what it has written stays. Returns when it has ended. Idempotent."""
        if self._loop is not None and self._task is not None and not self._end.done():
            with suppress(RuntimeError):  # the loop ended in between
                self._loop.call_soon_threadsafe(self._task.cancel)
        wait([self._end])

    async def _main(self) -> Progress:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(self._tell))
        self._began.set()
        try:
            return await self._task
        except asyncio.CancelledError:
            raise RequestCancelled("the batch was cancelled; submitted again, it goes on") from None

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
