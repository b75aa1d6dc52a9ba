"""Orders over the socket of a running cluster."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cluster import control
from cluster.control import Tell, send_order, serve_orders
from engine.errors import ConfigError, UnavailableError


async def obey(order: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    match order["order"]:
        case "refuse":
            raise ConfigError("pools.decode: no")
        case "hang":
            await asyncio.Event().wait()
    await tell({"step": 1})
    await tell({"step": 2})
    return {"did": order["order"]}


async def test_an_order_is_answered_after_its_progress(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    async with serve_orders(tmp_path / "s", obey):
        assert await send_order(tmp_path / "s", {"order": "work"}, seen.append) == {"did": "work"}
    assert seen == [{"step": 1}, {"step": 2}]


async def test_a_refusal_arrives_as_the_error_that_it_was(tmp_path: Path) -> None:
    async with serve_orders(tmp_path / "s", obey):
        with pytest.raises(ConfigError, match="decode: no"):
            await send_order(tmp_path / "s", {"order": "refuse"})
        with pytest.raises(ConfigError, match="not an order: KeyError: 'order'"):
            await send_order(tmp_path / "s", {})


async def test_only_its_user_may_open_the_socket_and_it_goes_with_the_cluster(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # a predecessor left its own
    async with serve_orders(path, obey):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()
    with pytest.raises(UnavailableError, match="takes no orders"):
        await send_order(path, {"order": "work"})


@pytest.mark.parametrize("line", [b"no json\n", b"[1]\n", b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n"])
async def test_what_is_no_order_is_answered_so(tmp_path: Path, line: bytes) -> None:
    async with serve_orders(tmp_path / "s", obey):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(line)
        assert b'"kind": "ConfigError"' in await reader.readline()
        writer.close()


async def test_who_says_nothing_is_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "READ_TIMEOUT_S", 0.01)
    async with serve_orders(tmp_path / "s", obey):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        assert await reader.read() == b""
        writer.close()


async def test_an_end_of_the_cluster_ends_the_orders_under_way(tmp_path: Path) -> None:
    async with serve_orders(tmp_path / "s", obey):
        waiting = asyncio.create_task(send_order(tmp_path / "s", {"order": "hang"}))
        await send_order(tmp_path / "s", {"order": "work"})
    with pytest.raises(UnavailableError, match="the cluster ended"):
        await waiting


async def test_only_so_many_orders_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 1)
    async with serve_orders(tmp_path / "s", obey):
        _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        with pytest.raises(UnavailableError, match="1 orders are under way"):
            await send_order(tmp_path / "s", {"order": "work"})
        writer.close()
