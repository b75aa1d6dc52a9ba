"""Keeps what benchmarks printed, and writes docs/benchmarks.md from it.

`python -m bench.transfer --json | python -m bench.results` keeps that run as `bench/results/transfer.json`, in place of
the one before; `python -m bench.results --render` only writes the page. The page has figures that were measured, met or
not, and nothing else.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

import click

from bench.report import REPOSITORY

RESULTS = REPOSITORY / "bench" / "results"
PAGE = REPOSITORY / "docs" / "benchmarks.md"

_HEAD = """\
# Measured

<!-- Made by `python -m bench.results` from bench/results. Run a benchmark again to change a figure. -->

Each section is one run of one command, which anybody can repeat; each comparison was made in that run, on that machine.
A goal that was missed says so. What each figure means is in the docstring of the benchmark
(`python -m pydoc bench.NAME`). `load` is the machine's load average over a minute when the report was made, the
benchmark's own share included.
"""


@click.command(help="Keep the last JSON line of standard input as a result, and write docs/benchmarks.md.")
@click.option("--render", "only_page", is_flag=True, help="Only write the page.")
def main(only_page: bool) -> None:
    if not only_page:
        keep(sys.stdin.read())
    PAGE.write_text(render(RESULTS), encoding="utf-8")


def keep(output: str, folder: Path = RESULTS) -> Path:
    """Store the last line of a benchmark's output, its JSON. Returns the file.

    Raises `click.ClickException`, and stores nothing, if that is no report.
    """
    lines = output.strip().splitlines()
    try:
        report = json.loads(lines[-1])
        path = folder / f"{report['bench']}.json"
        report["figures"], report["goals"]
    except (IndexError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise click.ClickException("the last line is no report: run the benchmark with --json") from error
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path


def render(folder: Path) -> str:
    """The whole page."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return "".join((_HEAD, *map(_section, reports)))


def _section(report: dict[str, Any]) -> str:
    name = report["bench"]
    goals = {goal["name"]: goal for goal in report["goals"]}
    lines = [f"\n## {name}\n", f"{question(name)} `python -m bench.{name}`\n"]
    lines += ["| figure | value | peer or limit | goal | met |", "|---|--:|--:|--:|---|"]
    for figure, value in report["figures"].items():
        goal = goals.get(figure)
        cells = (
            f"`{figure}`",
            number(value),
            number(report["peers"][figure]) if figure in report["peers"] else "",
            f"{goal['op']} {goal['target']:g}" if goal else "",
            ("yes" if goal["met"] else "**no**") if goal else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    load = f", load {report['load']:.1f}" if "load" in report else ""
    lines.append(f"\n{report['machine']}{load}; commit {report['commit']}, {report['date']}.")
    if report["notes"]:
        lines += ["", *(f"- {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """Four digits, and never a power of ten in place of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def question(name: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    text = (REPOSITORY / "bench" / f"{name}.py").read_text(encoding="utf-8")
    first = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ").split(": `")[0]
    return first if first.endswith((".", "?")) else f"{first}."


if __name__ == "__main__":
    main()
