"""The router's prefix index and decisions beside Dynamo's: `python -m bench.router_index [--json]`.

A million blocks at 64 workers. Dynamo's Python binding and ours run in one process, in Dynamo's environment
(`python -m bench.peers dynamo`), by turns; their answers are compared. Its side gets lists of ints, because that is
what the binding takes; ours gets the tokens as they come in, as bytes.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import statistics
from typing import Any

import click

from bench.peers import PeerMissing, ask
from bench.report import REPOSITORY, Goal, Report, median_spread
from bench.router_index_load import (
    EVENT_BLOCKS,
    INDEX_BYTES,
    PROMPT_BLOCKS,
    SPECULATION_S,
    SYSTEM_BLOCKS,
    OurDecision,
    OurIndex,
    conversations,
    interleaved,
)
from bench.router_index_restarts import restart_under_load
from bench.router_warm import warm_up
from cluster.config import default_model_dir, native_dir
from engine.model_store import pull_model
from engine.routing_key import RoutingKeys
from router.native.index import make_index
from router.prefix_index import PackedKeys, pack_keys

GOALS = (
    Goal("lookup_ratio", ">=", 3.0),
    Goal("decision_ratio", ">=", 6.0),
    Goal("ingest_ratio", ">=", 3.0),
    Goal("selection_ratio", ">=", 15.0),
    Goal("bytes_per_block", "<=", 100.0),
    Goal("soak_growth", "<=", 1.05),
    Goal("warm_s", "<=", 5.0),
    Goal("restart_s", "<=", 5.0),
    Goal("restart_odd_ends", "==", 0.0),
)
NUM_WORKERS = 64
RATIOS = {"lookup_ratio": "lookup", "decision_ratio": "decision", "ingest_ratio": "store", "selection_ratio": "select"}
SOAK_BYTES = 256 << 20
FAULTS = 0.05


@click.command(help="Prefix index and decisions beside Dynamo's.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--conversations", "count", type=int, default=2600, show_default=True, help="2600: a million blocks.")
@click.option("--rounds", type=int, default=9, show_default=True, help="Repetitions of each timing.")
@click.option("--soak-events", type=int, default=10_000_000, show_default=True, help="Blocks stored under a cap.")
@click.option("--kills", type=int, default=8, show_default=True, help="Of a router process under load.")
def main(as_json: bool, count: int, rounds: int, soak_events: int, kills: int) -> None:
    report = Report("router_index", GOALS)
    report.notes.append(f"load of the machine at the start: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    measure_memory(report, count)
    soak(report, soak_events)
    num_blocks = count * (PROMPT_BLOCKS - SYSTEM_BLOCKS)
    start_warm(report, num_blocks)
    restart(report, num_blocks, kills)
    compare(report, count, rounds)
    report.notes.append(f"load at the end: {os.getloadavg()[0]:.1f}")
    report.print(as_json)


def measure_memory(report: Report, count: int) -> None:
    """Growth of the process's resident memory for each distinct block."""
    held = conversations(NUM_WORKERS, count)
    packed = [RoutingKeys(7, b"", c.tokens, 16).all_short() for c in held]
    events = [pack_keys(keys) for keys in packed]
    workers = [conversation.worker for conversation in held]
    del held, packed
    before = resident_bytes()
    index = make_index(INDEX_BYTES, SPECULATION_S, str(native_dir()))
    slots = [index.add_worker() for _ in range(NUM_WORKERS)]
    for worker, event in zip(workers, events, strict=True):
        for start in range(0, len(event), 8 * EVENT_BLOCKS):
            index.apply(slots[worker], b"", event[start : start + 8 * EVENT_BLOCKS])
    num_blocks = index.stats().keys
    report.figures["bytes_per_block"] = (resident_bytes() - before) / num_blocks
    report.notes.append(f"bytes_per_block: growth of resident memory; {num_blocks:,} blocks")


def soak(report: Report, num_events: int) -> None:
    """New blocks without end, under a cap: resident memory at the end over that after a fifth of them."""
    index = make_index(SOAK_BYTES, SPECULATION_S, str(native_dir()))
    slot, after_a_fifth = index.add_worker(), 0
    mixed = 0x9E3779B97F4A7C15
    for start in range(0, num_events, EVENT_BLOCKS):
        index.store(slot, [(n * mixed) % (1 << 60) for n in range(start, start + EVENT_BLOCKS)])
        index.maintain()
        if start * 5 <= num_events < (start + EVENT_BLOCKS) * 5:
            after_a_fifth = resident_bytes()
    report.figures["soak_growth"] = resident_bytes() / after_a_fifth
    stats = index.stats()
    report.notes.append(
        f"soak: {num_events:,} blocks stored, {stats.evictions:,} evicted, {stats.keys:,} kept in about "
        f"{stats.num_bytes / 2**20:.0f} MiB of {SOAK_BYTES / 2**20:.0f}"
    )


def start_warm(report: Report, num_blocks: int) -> None:
    warm = asyncio.run(warm_up(NUM_WORKERS, num_blocks, str(native_dir())))
    report.figures["warm_s"], report.figures["warm_pause_ms"] = warm.seconds, warm.longest_pause_ms
    report.notes.append(f"warm_s: a new router and {NUM_WORKERS} workers with {num_blocks:,} blocks, in one process")


def restart(report: Report, num_blocks: int, kills: int) -> None:
    """A router process that is killed, and one that hears a part of its workers' messages wrongly."""
    folder = pull_model("smollm2-135m", default_model_dir(), lambda _stage, _share: None)
    found = asyncio.run(restart_under_load(folder, NUM_WORKERS, num_blocks, kills=kills))
    faulty = asyncio.run(restart_under_load(folder, NUM_WORKERS, num_blocks, kills=2, faults=FAULTS))
    codes = found.codes + faulty.codes
    report.figures["restart_s"] = max(found.warm_s)
    report.figures["restart_faulty_s"] = max(faulty.warm_s)
    report.figures["restart_odd_ends"] = codes.total() - codes["OK"] - codes["UNAVAILABLE"]
    report.notes.append(
        f"restart_s: from the start of the router's process until each of {NUM_WORKERS} workers, which keep changing "
        f"{num_blocks:,} blocks, was noted as it is, {median_spread(found.warm_s)} s; {found.served} requests "
        f"answered before that; {kills} times killed, {dict(found.codes)}"
    )
    report.notes.append(
        f"restart_faulty_s: with {faulty.num_faults} messages lost, repeated or swapped, {FAULTS:.0%} each; no "
        "difference was left"
    )


def compare(report: Report, count: int, rounds: int) -> None:
    arguments = [str(REPOSITORY), str(NUM_WORKERS), str(count), str(rounds), str(native_dir())]
    try:
        found: dict[str, Any] = ask("dynamo", "dynamo_index.py", arguments, timeout_s=900.0)
    except PeerMissing as missing:
        report.notes.append(f"no ratios: {missing}")
        found = time_ours(count, rounds, str(native_dir()))
    report.notes.append(f"our index is {found['implementation']}")
    for figure, what in RATIOS.items():
        ours = found[f"{what}_ours"]
        report.figures[f"{what}_us"] = statistics.median(ours)
        report.notes.append(f"{what}: ours {median_spread(ours)} us")
        if (theirs := found.get(f"{what}_dynamo")) is None:
            continue
        report.peers[f"{what}_us"] = statistics.median(theirs)
        report.figures[figure] = statistics.median(theirs) / statistics.median(ours)
        least = min(theirs) / min(ours)
        report.notes.append(f"{what}: Dynamo {median_spread(theirs)} us; ratio of the least figures {least:.3g}")


def time_ours(count: int, rounds: int, native_cache: str = "") -> dict[str, Any]:
    """Without the peer."""
    held, ours = conversations(NUM_WORKERS, count), OurIndex(NUM_WORKERS, native_cache)
    stored = [ours.messages(conversation) for conversation in held]

    def store() -> int:
        for conversation, messages in zip(held, stored, strict=True):
            ours.feed(conversation.worker, messages)
        return EVENT_BLOCKS * sum(map(len, stored))

    found = interleaved({"store_ours": store}, 1)
    ours.check()
    asked, decide = held[:: max(1, count // 100)], OurDecision(ours)
    known = [PackedKeys(RoutingKeys(7, b"", c.tokens, 16).all_short()) for c in asked]
    return (
        {"implementation": ours.index.implementation}
        | found
        | interleaved(
            {
                "lookup_ours": lambda: len([ours.index.lookup(keys, 0.0) for keys in known]),
                "decision_ours": lambda: len([ours.matches(c.tokens) for c in asked]),
                "select_ours": lambda: len([decide.choose(c.tokens) for c in asked]),
            },
            rounds,
        )
    )


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
