"""`kvrelay apply`, `scale`, `drain` and `flip`: change a running cluster of this machine, and say what that takes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cluster import state
from cluster.cli_common import CommandT, echo_json, json_option
from cluster.config import control_path, load_spec
from cluster.control import send_order
from cluster.spec import ROLES
from engine.errors import ConfigError

WAIT_S = 300.0


def _order_options(command: CommandT) -> CommandT:
    wait = "Seconds to wait until it is done; it goes on afterwards. 0: do not wait."
    command = click.option("--wait", "wait_s", type=float, default=WAIT_S, show_default=True, help=wait)(command)
    return json_option(command)


_cluster_option: Callable[[CommandT], CommandT] = click.option(
    "--cluster", metavar="NAME", default=None, help="Which local cluster, if several run."
)


@click.command()
@click.option("-f", "--file", "spec_path", type=click.Path(path_type=Path), required=True, help="The spec.")
@click.option("--dry-run", is_flag=True, help="Only say what would change.")
@_order_options
def apply(spec_path: Path, dry_run: bool, wait_s: float, as_json: bool) -> None:
    """Make the running cluster what the spec file says, without a failed request.

    Pools grow, or drain and shrink; workers with other settings are replaced one at a time. Applying the same file
    again changes nothing. What cannot be changed while it serves is refused, and then nothing is changed.
    """
    spec = load_spec(spec_path)
    order = {"order": "apply", "spec": json.dumps(dataclasses.asdict(spec)), "dry_run": dry_run}
    _carry_out(spec.name, order, wait_s, as_json)


@click.command()
@click.argument("sizes", nargs=-1, required=True, metavar="POOL=N...")
@_cluster_option
@_order_options
def scale(sizes: tuple[str, ...], cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Have N workers in a pool: `kvrelay scale prefill=2 decode=3`.

    A pool that shrinks drains: its requests may finish within `supervision.worker_drain_s`; those that are left go on
    elsewhere. The next `apply` goes by its file again.
    """
    _carry_out(cluster, {"order": "scale", "replicas": dict(map(_size, sizes))}, wait_s, as_json)


@click.command()
@click.argument("worker")
@_cluster_option
@_order_options
def drain(worker: str, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Take WORKER out of service: no new requests, those that it has finish or go on elsewhere, then it stops.

    Its pool has one worker less then.
    """
    _carry_out(cluster, {"order": "drain", "worker": worker}, wait_s, as_json)


@click.command()
@click.argument("worker")
@_cluster_option
@_order_options
def flip(worker: str, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Drain WORKER, and start one of the other role in its place. The only decode worker cannot be spared."""
    _carry_out(cluster, {"order": "flip", "worker": worker}, wait_s, as_json)


def _size(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if role not in ROLES or not count.isdecimal():
        raise ConfigError(f"{text}: expected POOL=N, with a pool of {', '.join(ROLES)}")
    return role, int(count)


def _carry_out(cluster: str | None, order: dict[str, Any], wait_s: float, as_json: bool) -> None:
    name = state.find_running(cluster).name
    progress = _ignore if as_json else _Progress()
    done = asyncio.run(send_order(control_path(name), order | {"wait_s": wait_s}, progress))
    if as_json:
        echo_json(done)
        return
    for line in done["lines"]:
        click.echo(line)
    if not done["changed"]:
        click.echo(f"cluster {name} is as it is wanted")


class _Progress:
    """One line for each step of a member."""

    def __init__(self) -> None:
        self._told: Mapping[str, str] = {}

    def __call__(self, progress: Mapping[str, Any]) -> None:
        members: Mapping[str, str] = progress["members"]
        if self._told:
            for name in [*members, *(name for name in self._told if name not in members)]:
                phase = members.get(name, "gone")
                if phase != self._told.get(name):
                    click.echo(f"  {name:<12} {phase}", err=True)
        self._told = members


def _ignore(_: Mapping[str, Any]) -> None:
    pass
