"""What several commands share: the router to talk to, and JSON for scripts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cluster.config import api_key

if TYPE_CHECKING:
    from kvrelay import Client, Tls

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

ROUTER_HELP = "HOST:PORT of a router. Default: the local cluster that `kvrelay up` started."
ORDER_HELP = "HOST:PORT of a router that passes the order on. Default: straight to the cluster of this machine."
JSON_HELP = "One JSON object on stdout, nothing else there."


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """A router and how to talk to it."""

    address: str
    tls: Tls | None
    api_key: str | None = dataclasses.field(repr=False)

    def client(self, timeout_s: float) -> Client:
        from kvrelay import Client  # loads gRPC, which commands without a router do without

        return Client(self.address, timeout_s=timeout_s, tls=self.tls, api_key=self.api_key)


def router_option(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command `endpoint`, the router to talk to. Its key comes from the environment: no list of processes
    and no history of a shell shall show it."""

    @functools.wraps(command)
    def with_endpoint(*, router: str | None, cluster: str | None, **arguments: Any) -> None:
        command(endpoint=_endpoint(router_address(router, cluster), arguments), **arguments)

    return _router_flags(ROUTER_HELP)(with_endpoint)


def order_option(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command `endpoint`, a router to give its order to, or None, and `cluster`: that of this machine."""

    @functools.wraps(command)
    def with_endpoint(*, router: str | None, **arguments: Any) -> None:
        tls = _endpoint(router or "", arguments)
        command(endpoint=None if router is None else tls, **arguments)

    return _router_flags(ORDER_HELP)(with_endpoint)


def _router_flags(router_help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    options = (
        click.option("--tls-key", metavar="FILE", default=None, help="Its private key."),
        click.option(
            "--tls-cert", metavar="FILE", default=None, help="Our certificate, where the router asks for one."
        ),
        click.option("--tls-ca", metavar="FILE", default=None, help="Authorities to trust, PEM: talk over TLS."),
        click.option("--cluster", metavar="NAME", default=None, help="Which local cluster, if several run."),
        click.option("--router", metavar="HOST:PORT", default=None, help=router_help),
    )
    return lambda command: functools.reduce(lambda done, option: option(done), options, command)


def _endpoint(address: str, arguments: dict[str, Any]) -> Endpoint:
    """Takes the flags of TLS out of `arguments`."""
    ca, cert, key = (arguments.pop(name) for name in ("tls_ca", "tls_cert", "tls_key"))
    tls = None
    if ca or cert or key:
        from kvrelay import Tls

        tls = Tls(ca_file=ca, cert_file=cert, key_file=key)
    return Endpoint(address, tls, api_key())


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
    """Dataclasses of `kvrelay.types`, or plain JSON values; bytes as hexadecimal digits."""
    click.echo(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form here")
