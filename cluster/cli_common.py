"""What several commands share: the router to talk to, and JSON for scripts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ROUTER_HELP = "HOST:PORT of a router. Default: the local cluster that `kvrelay up` started."
JSON_HELP = "One JSON object on stdout, nothing else there."


def router_option(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command `address`, the HOST:PORT of the router to talk to."""

    @click.option("--router", metavar="HOST:PORT", default=None, help=ROUTER_HELP)
    @click.option("--cluster", metavar="NAME", default=None, help="Which local cluster, if several run.")
    @functools.wraps(command)
    def with_address(*, router: str | None, cluster: str | None, **arguments: Any) -> None:
        command(address=router_address(router, cluster), **arguments)

    return with_address


def json_option(command: CommandT) -> CommandT:
    return click.option("--json", "as_json", is_flag=True, help=JSON_HELP)(command)


def timeout_option(default_s: float) -> Callable[[CommandT], CommandT]:
    return click.option(
        "--timeout", "timeout_s", type=float, default=default_s, show_default=True, help="Deadline in seconds."
    )


def router_address(router: str | None, cluster: str | None) -> str:
    """`router`, or the local cluster's. Raises `ConfigError` that says what to do if there is none, or several."""
    if router is not None:
        return router
    from cluster.state import find_running  # only the local default needs the cluster's files

    return find_running(cluster).router_address


def echo_json(value: Any) -> None:
    """A dataclass of `kvrelay.types`, or plain JSON values; bytes as hexadecimal digits."""
    plain = dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
    click.echo(json.dumps(plain, default=_hex, ensure_ascii=False))


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form here")
