"""Ways to a running cluster: its record on this machine, or the named actor of its router on a Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cluster import state
from cluster.config import control_path
from cluster.connection import TIMEOUT_S, Finder, RouterPlace
from cluster.control import send_order
from cluster.spec import check_name
from engine.errors import ConfigError, UnavailableError
from kvrelay._status import error_from_name

if TYPE_CHECKING:
    from ray.actor import ActorHandle

ROUTER_ACTORS = ("router", "router-2")
"""Names of a router's actor, in turn: one that takes over lives beside the one before."""
DEFAULT_NAME = "default"


def namespace_of(name: str) -> str:
    """Ray's, for the actors of cluster `name`."""
    check_name(name)
    return f"kvrelay-{name}"


def find(address: str, name: str | None) -> Finder:
    """See `cluster.connect`. Raises `ConfigError` if the address is none, or nothing is there."""
    if address == "local":
        return LocalFinder(state.find_running(name).name)
    if address == "auto" or address.startswith("ray://"):
        return RayFinder(address, name or DEFAULT_NAME)
    raise ConfigError(f"address must be local, auto or ray://HOST:PORT, got {address!r}")


class LocalFinder:
    """By the record that its `up` keeps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def place(self) -> RouterPlace:
        record = state.find_running(self._name)
        return RouterPlace(record.name, record.router_address, record.http_url)

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        return asyncio.run(send_order(control_path(self._name), order))

    def close(self) -> None:
        """There is nothing to close."""


class RayFinder:
    """By the router's name in the cluster's namespace. Connects this process to Ray, and disconnects it on `close`
    unless it was connected before."""

    def __init__(self, address: str, name: str) -> None:
        import ray

        self._namespace, self._name = namespace_of(name), name
        self._ours = not ray.is_initialized()
        if self._ours:
            try:
                ray.init(address, namespace=self._namespace, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"cannot join the Ray at {address}: {error}") from error

    def place(self) -> RouterPlace:
        told = self._ask("describe")
        return RouterPlace(self._name, told["address"], told["http_url"])

    def order(self, order: Mapping[str, Any]) -> dict[str, Any]:
        wait_s = float(order.get("wait_s", 0.0))
        answer = self._ask("order", dict(order), timeout_s=wait_s + 2 * TIMEOUT_S)
        if "error" in answer:
            raise error_from_name(answer["kind"], answer["error"])
        return dict(answer["done"])

    def close(self) -> None:
        import ray

        if self._ours:
            ray.shutdown()

    def _ask(self, method: str, *arguments: Any, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """The router is looked up each time: a new one has taken the place of one that died."""
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            told, actor = self._router()
            if method == "describe":
                return told
            return dict(ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s))
        except GetTimeoutError:
            raise UnavailableError(f"the router did not answer within {timeout_s:g} s") from None
        except (RayError, ConnectionError) as error:
            raise UnavailableError(f"the router cannot be asked through Ray: {error}") from error

    def _router(self) -> tuple[dict[str, Any], ActorHandle[Any]]:
        """Of two while one takes over, the one that stays; with what it says of itself."""
        import ray

        found: list[tuple[dict[str, Any], ActorHandle[Any]]] = []
        for name in ROUTER_ACTORS:
            with suppress(ValueError):  # nobody is called so now
                actor: ActorHandle[Any] = ray.get_actor(name, namespace=self._namespace)
                found.append((dict(ray.get(actor.describe.remote(), timeout=TIMEOUT_S)), actor))
        serving = [each for each in found if each[0]["address"] and not each[0]["retires"]]
        if not (serving or found):
            raise UnavailableError(f"no router of a cluster {self._name!r} runs on this Ray")
        return (serving or found)[0]
