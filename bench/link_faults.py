"""Do links survive everything that can happen to a frame?

`python -m bench.link_faults [--json] [--faults N] [--seed S] [--gloo]`

Several senders and one receiver, with the engine's own pools, over real sockets: short transfers, one after the other
on each sender, while faults of all kinds meet the frames of both directions at random (`kv_transfer.faults`). Senders
differ in their transports, every fourth has larger blocks than the receiver and converts them; every other round is
with native code, if it can be built. After every transfer, and after every round, when all links were closed:

wrong_adoptions: adopted blocks whose bytes are not the source's, and slots that were written after they were quiet. Of
lent ones: whose bytes are others while their generation says that they are what was lent.
leaks: slots that never became quiet; tickets, transfers, links, threads and descriptors left after a round; windows on
senders' pools; lent blocks that did not come back, once each.
hangs: transfers that did not end, on either side, within their deadline, lease and time-outs.
crashes: threads that ended by anything but a typed error.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from rich.console import Console

from bench.link_fault_lanes import (
    BOUND_S,
    DELAY_S,
    FREEZE_S,
    LAYOUT,
    SLOTS,
    Decode,
    Lane,
    Tally,
    Transports,
)
from bench.report import Goal, Report
from engine.errors import DeadlineExceeded, NativeUnavailable
from engine.kv_cache import KvCache
from engine.native.blocks import NativeBlockCopier, load_block_copier
from kv_transfer.digest import BlockCopier
from kv_transfer.faults import FaultInjector, FaultKind, FaultPlan
from kv_transfer.identity import ADOPT, GLOO, SHM, TCP

GOALS = tuple(Goal(name, "==", 0.0) for name in ("wrong_adoptions", "leaks", "hangs", "crashes"))
LANES = 32
"""They mostly wait for time-outs, so many of them fit on one core."""
RATE = 0.35
"""Of all frames, faults."""
TRANSPORTS: Transports = (
    (SHM,),
    (TCP,),
    (SHM, TCP),
    (SHM, TCP),
    (ADOPT,),
    (TCP,),
    (ADOPT, SHM, TCP),
    (TCP,),
)
"""Of the lanes, in turn."""
GLOO_TRANSPORTS: Transports = (*TRANSPORTS, (GLOO,), (GLOO,))
"""On request: torch's Gloo has once crashed the process when a group did not come about, after 88,000 faults."""


@contextmanager
def _counting_crashes(tally: Tally) -> Iterator[None]:
    def note(args: threading.ExceptHookArgs) -> None:
        tally.defect(
            "crashes", f"{args.thread.name if args.thread else '?'}: {args.exc_type.__name__} {args.exc_value}"
        )

    before, threading.excepthook = threading.excepthook, note
    try:
        yield
    finally:
        threading.excepthook = before


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(
    faults: int,
    plan: FaultPlan,
    report: Report,
    console: Console | None = None,
    transports: Transports = TRANSPORTS,
) -> None:
    """Rounds until `faults` were injected by `plan`, of which each lane follows another seed. Fills in `report`."""
    tally = Tally()
    pool = KvCache(LAYOUT, LANES * SLOTS, borrows=True)
    lanes = [Lane(number, replace(plan, seed=plan.seed * LANES + number), tally, transports) for number in range(LANES)]
    answers = FaultInjector(replace(plan, seed=-1 - plan.seed), delay_s=DELAY_S, freeze_s=FREEZE_S)
    injected: Counter[FaultKind] = Counter()
    began, rounds = time.monotonic(), 0
    with TemporaryDirectory() as cache, _counting_crashes(tally):
        native = _native(Path(cache), report)
        while injected.total() < faults:
            rounds += 1
            _round(rounds, lanes, pool, answers, native if rounds % 2 else None, tally)
            injected = sum(
                (Counter(one.injected()) for one in [answers, *(lane.injector for lane in lanes)]), Counter()
            )
            if console is not None:
                console.print(f"{injected.total()} faults, {time.monotonic() - began:.0f} s, {dict(tally.counts)}")
    tally.defect("leaks", "windows on pools of senders", 0 if pool.windows is None else pool.windows.num_open)
    for lane in lanes:
        lane.close()
    pool.close()
    _fill_in(report, tally, injected, time.monotonic() - began)


def _native(cache: Path, report: Report) -> NativeBlockCopier | None:
    try:
        return load_block_copier(cache)
    except NativeUnavailable as error:
        report.notes.append(f"no native code: {error}")
        return None


def _round(
    number: int,
    lanes: Sequence[Lane],
    pool: KvCache,
    answers: FaultInjector,
    copier: BlockCopier | None,
    tally: Tally,
) -> None:
    descriptors = _open_descriptors()
    decode = Decode(number, pool, answers, copier)
    decode.receiver.start()
    threads = [
        threading.Thread(target=lane.run_round, args=(decode,), name=f"lane-{n}") for n, lane in enumerate(lanes)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        decode.receiver.close(BOUND_S)
    except DeadlineExceeded as error:
        tally.defect("leaks", str(error))
    decode.table.check_integrity()
    stats = decode.table.stats()
    tally.defect("leaks", "tickets", stats.open + stats.ending)
    tally.defect("leaks", "links of the receiver", decode.receiver.stats().links_open)
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]
    tally.defect("leaks", f"threads {left}", len(left))
    tally.defect("leaks", "file descriptors", max(0, _open_descriptors() - descriptors))


def _fill_in(report: Report, tally: Tally, injected: Counter[FaultKind], seconds: float) -> None:
    report.figures["faults"] = float(injected.total())
    for goal in GOALS:
        report.figures[goal.name] = float(tally.counts[goal.name])
    report.figures["transfers"] = float(tally.counts["transfers"])
    report.figures["slowest_transfer_s"] = tally.slowest_s
    report.figures["seconds"] = seconds
    for kind in FaultKind:
        report.figures[f"faults_{kind}"] = float(injected[kind])
    report.notes.append("transfers by outcome: " + ", ".join(f"{n} {name}" for name, n in tally.outcomes.most_common()))
    report.notes += tally.details


@click.command()
@click.option("--json", "as_json", is_flag=True)
@click.option("--faults", default=100_000, show_default=True, help="Go on until so many were injected.")
@click.option("--seed", default=0, show_default=True)
@click.option("--gloo", is_flag=True, help="Over gloo too.")
def main(as_json: bool, faults: int, seed: int, gloo: bool) -> None:
    report = Report("link_faults", GOALS)
    transports = GLOO_TRANSPORTS if gloo else TRANSPORTS
    run(faults, FaultPlan(rate=RATE, seed=seed), report, Console(stderr=True), transports)
    report.print(as_json)


if __name__ == "__main__":
    main()
