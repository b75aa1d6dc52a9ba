"""`kvrelay doctor`: what will fail here, what will be slow, and what to do."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from cluster.cli_common import echo_json, json_option
from cluster.config import default_model_dir, load_spec, prepare_ray_environment
from cluster.doctor import Finding, Verdict, examine
from cluster.facts import Facts, gather
from cluster.spec import ClusterSpec
from engine.errors import UnavailableError

if TYPE_CHECKING:
    from cluster.facts import NodeFact

_STYLES = {Verdict.GOOD: "green", Verdict.SLOW: "yellow", Verdict.FAILS: "bold red"}


@click.command()
@click.argument("spec_path", metavar="[SPEC]", type=click.Path(path_type=Path), required=False)
@json_option
@click.pass_context
def doctor(context: click.Context, spec_path: Path | None, as_json: bool) -> None:
    """Say whether the cluster of the file SPEC, or the default one, will run here: what fails, what is slow, the fix.

    Starts and changes nothing. With `ray.address` of a running Ray, its nodes are asked too. Exit code 1: something
    will fail.
    """
    spec = load_spec(spec_path) if spec_path is not None else ClusterSpec()
    facts = gather(spec, default_model_dir())
    if not spec.ray.local:
        facts = _with_nodes(facts, spec)
    findings = examine(facts, spec)
    if as_json:
        echo_json({"findings": [_plain(finding) for finding in findings], "facts": _plain_facts(facts)})
    else:
        _show(findings)
    context.exit(1 if any(finding.verdict is Verdict.FAILS for finding in findings) else 0)


def _with_nodes(facts: Facts, spec: ClusterSpec) -> Facts:
    prepare_ray_environment(cluster_id="", local=False, auth_token="")
    from cluster.ray_facts import node_facts  # Ray reads its environment while it is imported

    try:
        nodes: tuple[NodeFact, ...] = node_facts(spec.ray.address)
    except UnavailableError as error:
        return replace(facts, nodes_error=str(error))
    return replace(facts, nodes=nodes)


def _show(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        style = _STYLES[finding.verdict]
        fix = f"\n→ {finding.fix}" if finding.fix else ""
        table.add_row(f"[{style}]{finding.verdict.value}[/]", finding.check, finding.text.replace("[", "\\[") + fix)
    Console(highlight=False).print(table)


def _plain(finding: Finding) -> dict[str, str]:
    return {"check": finding.check, "verdict": finding.verdict.value, "text": finding.text, "fix": finding.fix}


def _plain_facts(facts: Facts) -> dict[str, object]:
    return {**asdict(facts), "cpu_flags": sorted(facts.cpu_flags)}
