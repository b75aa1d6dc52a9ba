"""`kvrelay batch`, and `python -m cluster.jobs.batch`, which `ray job submit` runs: OpenAI batch files in and out."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from cluster.cli import as_command
from cluster.cli_common import echo_json, json_option
from cluster.config import api_key
from cluster.finders import find
from cluster.jobs.http_sender import http_sender
from cluster.jobs.runner import LOWEST_PRIORITY, BatchRun, Progress, count_lines
from engine.errors import UnavailableError

DEFAULT_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch and where to send it."""

    source: Path
    output: Path
    base_url: str
    concurrency: int = 16
    priority: int = LOWEST_PRIORITY
    timeout_s: float = DEFAULT_TIMEOUT_S
    """For one answer."""
    patience_s: float = 600.0
    """For how long the router may be away."""
    ca_file: str | None = None

    async def run(self, tell: Callable[[Progress], None]) -> Progress:
        """Raises as `BatchRun.run` does. Run again with the same files, it goes on where it was."""
        async with http_sender(
            self.base_url, api_key=api_key(), ca_file=self.ca_file, timeout_s=self.timeout_s
        ) as send:
            run = BatchRun(
                self.source,
                self.output,
                send,
                concurrency=self.concurrency,
                priority=self.priority,
                patience_s=self.patience_s,
                tell=tell,
            )
            return await run.run()


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Records are appended to it.")
@click.option("--url", default=None, help="Of the router's HTTP. Default: the local cluster's.")
@click.option("--cluster", metavar="NAME", default=None, help="Which cluster, if several run.")
@click.option(
    "--ray", metavar="ADDRESS", default=None, help="Find the router through this Ray: auto, or ray://HOST:PORT."
)
@click.option("--concurrency", type=int, default=16, show_default=True, help="Requests at once, at most.")
@click.option(
    "--priority", type=int, default=LOWEST_PRIORITY, show_default=True, help="Of requests that name none; 8 is last."
)
@click.option("--timeout", "timeout_s", default=DEFAULT_TIMEOUT_S, show_default=True, help="Of one answer, seconds.")
@click.option("--patience", "patience_s", default=600.0, show_default=True, help="How long the router may be away.")
@click.option("--tls-ca", metavar="FILE", default=None, help="Authorities to trust, PEM, for an https URL.")
@json_option
def batch(
    source: Path,
    output: Path,
    url: str | None,
    cluster: str | None,
    ray: str | None,
    tls_ca: str | None,
    as_json: bool,
    **limits: float,
) -> None:
    """Answer every request of SOURCE, a file in OpenAI's batch format, with a record in the output.

    Killed at any moment and run again, it goes on where it was: each line gets exactly one record. Other requests go
    first: the batch has the lowest priority, and waits when the router has no room.
    """
    job = BatchJob(
        source=source,
        output=output,
        base_url=url or _find(ray, cluster),
        ca_file=tls_ca,
        concurrency=int(limits["concurrency"]),
        priority=int(limits["priority"]),
        timeout_s=limits["timeout_s"],
        patience_s=limits["patience_s"],
    )
    started = time.monotonic()
    with _bar(source, hidden=as_json) as tell:
        end = asyncio.run(job.run(tell))
    if as_json:
        echo_json({**dataclasses.asdict(end), "seconds": round(time.monotonic() - started, 3)})
    else:
        found = f", {end.found} of them by an earlier run" if end.found else ""
        click.echo(f"{end.done} lines done{found}, {end.failed} with an error: {output}", err=True)


def _find(ray: str | None, cluster: str | None) -> str:
    with closing(find(ray or "local", cluster)) as finder:
        http_url = finder.place().http_url
    if not http_url:
        raise UnavailableError("the router serves no HTTP yet")
    return http_url


@contextmanager
def _bar(source: Path, *, hidden: bool) -> Iterator[Callable[[Progress], None]]:
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield lambda progress: None
        return
    told = TextColumn("{task.fields[note]}")
    with Bar(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), told, console=console) as bar:
        task = bar.add_task("batch", total=count_lines(source), note="")

        def tell(progress: Progress) -> None:
            note = f"{progress.in_flight} running, {progress.failed} errors, {progress.refusals} times no room"
            bar.update(task, completed=progress.done, note=note)

        yield tell


if __name__ == "__main__":
    as_command(batch)
