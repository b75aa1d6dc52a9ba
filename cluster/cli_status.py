"""`kvrelay status` and `kvrelay explain`: what a router knows, as a table or as JSON."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.cli import one_line
from cluster.cli_common import Endpoint, echo_json, json_option, router_option
from engine.errors import UnavailableError
from kvrelay import Client, ClusterStatus, Explanation, PricedPair, WorkerStatus
from kvrelay.summary import format_bytes, summarize_route, summarize_waterfall

TIMEOUT_S = 10.0
REFRESH_S = 1.0
NO_TERMINAL_WIDTH = 160
FULL_WIDTH = 112
"""Of a terminal that has room for every column; a narrower one gets the pool as a bar."""
BAR_WIDTH = 12
_BLOCKS = {"owned": ("█", "blue"), "leased": ("▓", "yellow"), "quarantined": ("!", "red"), "cached": ("▒", "cyan")}
"""How a bar shows them, in this order; the rest is free, or not told."""
_STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "lost": "red"}


@click.command()
@router_option
@json_option
@click.option("--watch", is_flag=True, help=f"Refresh every {REFRESH_S:.0f} s until Ctrl-C.")
def status(endpoint: Endpoint, as_json: bool, watch: bool) -> None:
    """Show the router's view of its workers."""
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other")
    with endpoint.client(TIMEOUT_S) as client:
        if watch:
            _watch(client)
        elif as_json:
            echo_json(client.status())
        else:
            console = _console()
            console.print(status_view(client.status(), console.width))


@click.command()
@click.argument("request_id", required=False)
@router_option
@json_option
@click.option("--last", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many to list.")
def explain(request_id: str | None, endpoint: Endpoint, as_json: bool, last: int) -> None:
    """Show how the request REQUEST_ID was placed, and what happened; without it, list the last requests.

    Routers remember recent requests only.
    """
    with endpoint.client(TIMEOUT_S) as client:
        if request_id is None:
            recent = client.recent(last)
            if as_json:
                echo_json(recent)
            else:
                _console().print(recent_view(recent))
            return
        explanation = client.explain(request_id)
    if as_json:
        echo_json(explanation)
    else:
        _console().print(explanation_view(explanation))


def status_view(status: ClusterStatus, width: int = NO_TERMINAL_WIDTH) -> RenderableType:
    headline = (
        f"router {status.router_id}, version {status.version}, up {format_duration(status.uptime_ms // 1000)}: "
        f"{status.live_requests} live requests, {status.requests_total} in all, {status.requests_failed} failed, "
        f"{status.requests_cancelled} cancelled, {status.requests_refused} refused"
    )
    if not status.workers:
        return Group(Text(headline), Text("no workers"))
    table = _full_table(status.workers) if width >= FULL_WIDTH else _narrow_table(status.workers)
    return Group(Text(headline), table, *_remarks(status.workers), *_prediction(status))


def _full_table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "blocks", "free", "cached", "owned", "speed", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        table.add_row(*_cells(worker))
    return table


def _narrow_table(workers: Sequence[WorkerStatus]) -> Table:
    """Within 80 columns: counts of blocks are a bar, and the share of the pool that is held."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True, max_width=18)
    for name in ("role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("run", "wait"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("blocks", no_wrap=True, min_width=BAR_WIDTH)
    for name in ("held", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in workers:
        held = worker.blocks_owned + worker.blocks_leased + worker.blocks_quarantined
        share = f"{held / worker.blocks_total:.0%}" if worker.blocks_total else "-"
        counts = (str(worker.running), str(worker.waiting))
        table.add_row(*_cells(worker)[:3], *counts, blocks_bar(worker), share, speed_of(worker))
    return table


def blocks_bar(worker: WorkerStatus) -> Text:
    """What is there at all is at least one character."""
    bar = Text()
    for state, (character, style) in _BLOCKS.items():
        count = getattr(worker, f"blocks_{state}")
        cells = max(1, round(count * BAR_WIDTH / worker.blocks_total)) if count and worker.blocks_total else 0
        bar.append(character * min(cells, BAR_WIDTH - len(bar)), style)
    return bar.append("░" * (BAR_WIDTH - len(bar)), "dim")


def _prediction(status: ClusterStatus) -> Iterator[Text]:
    """What the router believes to be resident where, and how good its estimates were."""
    index = status.prefix_index
    if index.keys or index.speculative_keys:
        size = f"{format_bytes(index.num_bytes)} of {format_bytes(index.max_bytes)}"
        keys = f"{index.keys} keys, {index.speculative_keys} expected, {index.evictions} evicted"
        yield Text(f"prefix index: {keys}, {size}")
    if status.term_errors:
        told = ", ".join(f"{e.name} {e.mean_ms:+.1f} (off by {e.mean_abs_ms:.1f})" for e in status.term_errors)
        yield Text(f"estimates less actual, mean ms: {told}")


def explanation_view(explanation: Explanation) -> RenderableType:
    title = Text(f"request {explanation.request_id}: {explanation.outcome}")
    told = [*summarize_route(explanation.route), *summarize_waterfall(explanation.waterfall)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("prefill", "decode"):
        table.add_column(name, no_wrap=True)
    for name in ("estimate, ms", "may cost more", "cached"):
        table.add_column(name, justify="right")
    table.add_column("made of")
    for pair in explanation.considered:
        terms = " + ".join(f"{term.name} {term.ms:.1f}" for term in pair.terms)
        numbers = (f"{pair.total_ms:.1f}", f"{pair.affinity_ms:.1f}", str(pair.cached_tokens))
        table.add_row(pair.prefill_worker or pair.decode_worker, pair.decode_worker, *numbers, terms)
    chosen = [_outcome_view(pair) for pair in explanation.considered[:1]]
    considered = Text("considered, best first by price less what it may cost more; the first was chosen:")
    return Group(title, *map(Text, told), *chosen, considered, table)


def recent_view(recent: Sequence[Explanation]) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("request", "outcome", "prefill", "decode"):
        table.add_column(name)
    for name in ("estimate, ms", "TTFT, ms", "cached: expected", "found"):
        table.add_column(name, justify="right")
    for explanation in recent:
        cells = [explanation.request_id, explanation.outcome]
        for pair in explanation.considered[:1]:
            found = "-" if pair.found_cached_tokens is None else str(pair.found_cached_tokens)
            cells += [pair.prefill_worker or pair.decode_worker, pair.decode_worker, f"{pair.total_ms:.1f}"]
            cells += [f"{explanation.waterfall.ttft_us / 1000:.1f}", str(pair.cached_tokens), found]
        table.add_row(*cells)
    return table if recent else Text("no request yet")


def _outcome_view(pair: PricedPair) -> RenderableType:
    """Of the chosen pair: estimate beside what came of it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("term")
    for name in ("estimated, ms", "actual, ms"):
        table.add_column(name, justify="right")
    for term in pair.terms:
        table.add_row(term.name, f"{term.ms:.1f}", "-" if term.actual_ms is None else f"{term.actual_ms:.1f}")
    found = "-" if pair.found_cached_tokens is None else str(pair.found_cached_tokens)
    table.add_row("cached tokens", str(pair.cached_tokens), found)
    return table


def format_duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def _console() -> Console:
    """As wide as the terminal; wide enough for every column where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=NO_TERMINAL_WIDTH)


def _watch(client: Client) -> None:
    """Until Ctrl-C. A router that is away for a while is shown as such, and asked again."""
    tick = threading.Event()  # never set: its timed wait is the refresh interval, and Ctrl-C ends it at once
    try:
        console = _console()
        with Live(_view_or_error(client, console.width), console=console, auto_refresh=False) as live:
            while not tick.wait(REFRESH_S):
                live.update(_view_or_error(client, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def _view_or_error(client: Client, width: int) -> RenderableType:
    try:
        return status_view(client.status(), width)
    except UnavailableError as error:
        return Text(one_line(error), style="red")


def _cells(worker: WorkerStatus) -> list[RenderableType]:
    blocks = (worker.blocks_total, worker.blocks_free, worker.blocks_cached, worker.blocks_owned)
    return [
        worker.worker_id,
        worker.role,
        Text(worker.state, style=_STATE_STYLES.get(worker.state, "")),
        *(str(count) for count in (worker.running, worker.waiting, *blocks)),
        speed_of(worker),
        format_bytes(worker.resident_bytes),
    ]


def speed_of(worker: WorkerStatus) -> str:
    """`-` for a worker that does nothing: what was measured last is of another time."""
    if worker.running and worker.role == "decode" and worker.decode_step_ms:
        return f"{worker.decode_step_ms:.1f} ms/step"
    if worker.running and worker.role == "prefill" and worker.prefill_tokens_per_s:
        return f"{worker.prefill_tokens_per_s:.0f} tok/s"
    return "-"


def _remarks(workers: tuple[WorkerStatus, ...]) -> Iterator[Text]:
    """Why a worker is not ready, which errors it counted, blocks in states that do not last, and GPUs."""
    for worker in workers:
        if worker.device not in ("", "cpu"):
            yield Text(f"{worker.worker_id} on {worker.device}; {worker.kernels}")
        if worker.detail:
            yield Text(f"{worker.worker_id}: {worker.detail}", style="yellow")
        if worker.blocks_leased or worker.blocks_quarantined:
            yield Text(f"{worker.worker_id}: {worker.blocks_leased} leased, {worker.blocks_quarantined} quarantined")
        if worker.blocks_state not in ("", "live"):
            yield Text(f"{worker.worker_id}: what it holds is {worker.blocks_staleness_s:.1f} s old", style="yellow")
        if worker.errors:
            counts = ", ".join(f"{name} {count}" for name, count in sorted(worker.errors.items()))
            yield Text(f"{worker.worker_id} errors: {counts}")
