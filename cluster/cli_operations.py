"""`kvrelay apply`, `scale`, `drain`, `flip`, `restart`: change a running cluster, and say what that takes.

Orders go to the cluster of this machine over its socket; `scale`, `drain` and `flip` also over a router.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from cluster import state
from cluster.cli_common import CommandT, Endpoint, echo_json, json_option, order_option
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
    _give(order, None, spec.name, wait_s, as_json)


@click.command()
@click.argument("sizes", nargs=-1, required=True, metavar="POOL=N...")
@order_option
@_order_options
def scale(sizes: tuple[str, ...], endpoint: Endpoint | None, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Have N workers in a pool: `kvrelay scale prefill=2 decode=3`.

    A pool that shrinks drains: its requests may finish within `supervision.worker_drain_s`; those that are left go on
    elsewhere. The next `apply` goes by its file again.
    """
    _give({"order": "scale", "replicas": dict(map(_size, sizes))}, endpoint, cluster, wait_s, as_json)


@click.command()
@click.argument("worker")
@order_option
@_order_options
def drain(worker: str, endpoint: Endpoint | None, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Take WORKER out of service: no new requests, those that it has finish or go on elsewhere, then it stops.

    Its pool has one worker less then.
    """
    _give({"order": "drain", "worker": worker}, endpoint, cluster, wait_s, as_json)


@click.command()
@click.argument("worker")
@order_option
@_order_options
def flip(worker: str, endpoint: Endpoint | None, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Drain WORKER, and start one of the other role in its place. The only decode worker cannot be spared."""
    _give({"order": "flip", "worker": worker}, endpoint, cluster, wait_s, as_json)


@click.command()
@click.option("--router", "what", flag_value="router", required=True, help="The router.")
@_cluster_option
@_order_options
def restart(what: str, cluster: str | None, wait_s: float, as_json: bool) -> None:
    """Have another router take over, without a failed request: it reads keys, certificates and prefixes anew.

    The new one listens on the same ports before the old one stops; what runs on the old one may finish within
    `supervision.worker_drain_s`.
    """
    _give({"order": "restart"}, None, cluster, wait_s, as_json)


def _size(text: str) -> tuple[str, int]:
    role, _, count = text.partition("=")
    if role not in ROLES or not count.isdecimal():
        raise ConfigError(f"{text}: expected POOL=N, with a pool of {', '.join(ROLES)}")
    return role, int(count)


def _give(order: dict[str, Any], endpoint: Endpoint | None, cluster: str | None, wait_s: float, as_json: bool) -> None:
    if endpoint is not None:
        name, done = f"of {endpoint.address}", _over_router(endpoint, order, wait_s)
    else:
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


def _over_router(endpoint: Endpoint, order: Mapping[str, Any], wait_s: float) -> dict[str, Any]:
    with endpoint.client(wait_s or WAIT_S) as client:
        match order["order"]:
            case "scale":
                return dataclasses.asdict(client.scale(wait_s=wait_s, **order["replicas"]))
            case "drain":
                return dataclasses.asdict(client.drain(order["worker"], wait_s=wait_s))
            case _:
                return dataclasses.asdict(client.flip(order["worker"], wait_s=wait_s))


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
