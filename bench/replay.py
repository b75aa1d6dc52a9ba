"""Replays recorded requests through the router's own index and policy, with simulated workers, and through the cost
rules of other routers: `python -m bench.replay [--json] [--trace NAME-or-FILE]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from bench.replay_rules import RULES, Ours
from bench.replay_workers import Simulation
from bench.report import Goal, Report
from bench.traces import NAMED, Recorded, read_trace

GOALS = (
    Goal("hit_rate_4", ">=", 33.0),
    Goal("balance_4", "<=", 1.10),
    Goal("hit_rate_8", ">=", 33.0),
    Goal("p90_ttft_vs_best_peer", "<=", 1.0),
    Goal("azure_p90_vs_least_loaded", "<=", 1.0),
)


@click.command(help="Recorded requests through our placement and through the rules of others.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--trace", default="mooncake_conversation", show_default=True, help=f"{', '.join(NAMED)}, or a file.")
@click.option("--limit", type=int, default=None, help="Only the first requests.")
@click.option("--cache-blocks", type=int, default=1_000_000, show_default=True, help="Of 512 tokens, at each worker.")
def main(as_json: bool, trace: str, limit: int | None, cache_blocks: int) -> None:
    report = Report("replay", GOALS)
    recorded = read_trace(trace)[:limit]
    ideal = ideal_hit_rate(recorded)
    report.notes.append(f"{trace}: {len(recorded)} requests; one cache without limit would hit {ideal:.2f} %")
    compare(report, recorded, cache_blocks)
    ours_8 = Simulation(8, cache_blocks).run(recorded, Ours())
    report.figures["hit_rate_8"], report.peers["hit_rate_8"] = ours_8.hit_rate, ideal
    report.notes.append(f"8 workers: {ours_8}")
    report.peers["hit_rate_4"] = ideal
    if trace != "azure_conversation":
        against_least_loaded(report, read_trace("azure_conversation")[:limit], cache_blocks)
    report.print(as_json)


def compare(report: Report, recorded: Sequence[Recorded], cache_blocks: int) -> None:
    """At 4 workers."""
    ours = Simulation(4, cache_blocks).run(recorded, Ours())
    report.figures["hit_rate_4"], report.figures["balance_4"] = ours.hit_rate, ours.balance
    report.notes.append(f"4 workers, ours: {ours}")
    p90s: dict[str, float] = {}
    for name, rule in RULES.items():
        outcome = Simulation(4, cache_blocks).run(recorded, rule())
        report.notes.append(f"4 workers, {name}: {outcome}")
        if name != "least loaded":
            p90s[name] = outcome.ttft_ms(90)
    best = min(p90s, key=p90s.__getitem__)
    report.figures["p90_ttft_ms"], report.peers["p90_ttft_ms"] = ours.ttft_ms(90), p90s[best]
    report.figures["p90_ttft_vs_best_peer"] = ours.ttft_ms(90) / p90s[best]
    report.notes.append(f"the best peer rule at p90 is {best}")


def against_least_loaded(report: Report, recorded: Sequence[Recorded], cache_blocks: int) -> None:
    """Where nothing is known to begin alike."""
    ours = Simulation(4, cache_blocks).run(recorded, Ours())
    theirs = Simulation(4, cache_blocks).run(recorded, RULES["least loaded"]())
    report.figures["azure_p90_vs_least_loaded"] = ours.ttft_ms(90) / theirs.ttft_ms(90)
    report.notes.append(f"Azure's lengths, ours: {ours}; least loaded: {theirs}")


def ideal_hit_rate(recorded: Sequence[Recorded]) -> float:
    seen: set[int] = set()
    hits = total = 0
    for one in recorded:
        total += one.num_blocks
        hits += next((i for i, key in enumerate(one.prefix_ids) if key not in seen), len(one.prefix_ids))
        seen.update(one.prefix_ids)
    return 100 * hits / total


if __name__ == "__main__":
    main()
