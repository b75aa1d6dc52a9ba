"""Do our Triton kernels compile for the GPUs that we ship for, and what do they need there?

`python -m bench.kernels --aot [--arch 80 --arch 90 --arch 100] [--only TEXT] [--json]`

Every kernel, as `engine.kernels` launches it for the model families and KV types of `bench.kernel_cases`, is compiled
ahead of time: no GPU is needed, and none is asked. Fails (exit 1) on registers that were spilled, on more shared
memory than a block may have, and on an attention kernel without matrix instructions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from bench.report import Goal, Report

if TYPE_CHECKING:
    from bench.aot import Compiled

ARCHITECTURES = (80, 90, 100)
GOALS = (
    Goal("spills", "==", 0),
    Goal("shared_memory_over_limit", "==", 0),
    Goal("attention_kernels_without_mma", "==", 0),
)


@click.command(help="Compile every Triton kernel that we ship, for GPUs that need not be here.")
@click.option("--aot", is_flag=True, required=True, help="Ahead of time, which is all that there is so far.")
@click.option("--arch", "archs", type=int, multiple=True, default=ARCHITECTURES, help="Compute capabilities.")
@click.option("--only", default="", help="Cases with this text in their names.")
@click.option("--jobs", default=2, show_default=True, help="Processes that compile.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
def main(aot: bool, archs: tuple[int, ...], only: str, jobs: int, as_json: bool) -> None:
    try:
        import triton
    except ModuleNotFoundError:
        raise click.ClickException("triton is not installed: pip install 'kvrelay[gpu]'") from None
    rows = compile_all(archs, only, jobs)
    console = Console(stderr=as_json, width=160)
    console.print(_table(rows))
    report = report_of(rows)
    report.notes.append(f"triton {triton.__version__}, {', '.join(f'sm_{arch}' for arch in archs)}; no GPU was used")
    report.print(as_json)
    if not rows or any(not goal.met(report.figures[goal.name]) for goal in GOALS):
        sys.exit(1)


def compile_all(archs: Sequence[int], only: str, jobs: int) -> list[Compiled]:
    """Every case with `only` in its name, for every architecture. Raises what Triton raises, for the first failure."""
    from bench.kernel_cases import cases

    numbers = [number for number, case in enumerate(cases()) if only in case.name]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(partial(_compile_case, archs), numbers, chunksize=2)
        return [row for rows in found for row in rows]


def _compile_case(archs: Sequence[int], number: int) -> list[Compiled]:
    from bench.aot import compile_launch, recorded
    from bench.kernel_cases import KERNELS, cases

    case = list(cases())[number]
    return [
        compile_launch(launch, case.name, arch)
        for arch in archs
        for launch in recorded(KERNELS, partial(case.launch, arch))
    ]


def report_of(rows: Sequence[Compiled]) -> Report:
    from bench.kernel_cases import ATTENTION

    report = Report("kernels", GOALS)
    report.figures = {
        "kernels": len(rows),
        "spills": sum(row.spilled > 0 for row in rows),
        "shared_memory_over_limit": sum(row.shared > row.shared_limit for row in rows),
        "attention_kernels_without_mma": sum(row.kernel in ATTENTION and not row.matrix for row in rows),
    }
    return report


def _table(rows: Sequence[Compiled]) -> Table:
    table = Table(title="bench.kernels: compiled ahead of time")
    for column in ("kernel", "case", "GPU", "registers", "spilled", "shared", "limit", "matrix instructions"):
        table.add_column(column, justify="left" if column in ("kernel", "case") else "right", overflow="fold")
    for row in rows:
        over = row.shared > row.shared_limit
        table.add_row(
            row.kernel.removesuffix("_kernel"),
            row.case,
            f"sm_{row.arch}",
            str(row.registers),
            f"{row.spilled} B" if row.spilled else "",
            f"{row.shared / 1024:.1f} KiB{' OVER' if over else ''}",
            f"{row.shared_limit // 1024} KiB",
            ", ".join(row.matrix),
        )
    return table


if __name__ == "__main__":
    main()
