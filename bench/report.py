"""One format for every benchmark: a table for people, one JSON object as the last line for machines."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
Operator = Literal["<=", ">=", "=="]


@dataclass(frozen=True, slots=True)
class Goal:
    """`name` must stand in `op` to `target`."""

    name: str
    op: Operator
    target: float

    def met(self, value: float) -> bool:
        if self.op == "<=":
            return value <= self.target
        if self.op == ">=":
            return value >= self.target
        return value == self.target


@dataclass(slots=True)
class Report:
    """What one run measured. `figures` are named by the issue that asked for them, and keep their names."""

    bench: str
    goals: Sequence[Goal] = ()
    figures: dict[str, float] = field(default_factory=dict)
    peers: dict[str, float] = field(default_factory=dict)
    """For a figure: the peer's or the limit's value in the same run."""
    notes: list[str] = field(default_factory=list)

    def print(self, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self._as_object()), flush=True)
        else:
            self._print_table()

    def _as_object(self) -> dict[str, object]:
        return {
            "bench": self.bench,
            "commit": commit(),
            "machine": machine(),
            "load": os.getloadavg()[0],
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "figures": self.figures,
            "peers": self.peers,
            "goals": [
                {
                    "name": goal.name,
                    "value": self.figures[goal.name],
                    "op": goal.op,
                    "target": goal.target,
                    "met": goal.met(self.figures[goal.name]),
                }
                for goal in self.goals
                if goal.name in self.figures
            ],
            "notes": self.notes,
        }

    def _print_table(self) -> None:
        table = Table(title=f"bench.{self.bench}")
        for column in ("figure", "value", "peer or limit", "goal", "met"):
            table.add_column(column, justify="left" if column == "figure" else "right")
        goals = {goal.name: goal for goal in self.goals}
        for name, value in self.figures.items():
            goal = goals.get(name)
            table.add_row(
                name,
                f"{value:,.6g}",
                f"{self.peers[name]:,.6g}" if name in self.peers else "",
                f"{goal.op} {goal.target:g}" if goal else "",
                ("yes" if goal.met(value) else "NO") if goal else "",
            )
        console = Console()
        console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")
        console.print(f"{machine()}; commit {commit()}; {datetime.datetime.now(datetime.UTC).date()}")


def commit() -> str:
    """Short commit of the checkout, with `+` if files differ from it."""
    try:
        head = subprocess.run(
            ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return head + ("+" if changed else "")


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{os.cpu_count()} cores {model}, Python {platform.python_version()}, torch {version('torch')}"


def median_spread(values: Sequence[float]) -> str:
    """`median (min to max)` for notes."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
