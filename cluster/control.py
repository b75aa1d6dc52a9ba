"""The way to a running `kvrelay up`: one order a connection, over a Unix socket that only its user can open.

    {"order": ...}  ─▶
                    ◀─  {"progress": {...}}, any number
                    ◀─  {"done": {...}}  or  {"error": "what", "kind": "ConfigError"}

A line of JSON each. Who orders goes away: what was begun goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, EngineError, UnavailableError
from kvrelay._status import error_from_name

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20
READ_TIMEOUT_S = 5.0
"""For the order to be there once somebody has connected."""
MAX_CONNECTIONS = 16
ANSWER_MARGIN_S = 30.0
"""What an answer may take beyond the time that the order itself may take."""

Tell = Callable[[Mapping[str, Any]], Awaitable[None]]
CarryOut = Callable[[Mapping[str, Any], Tell], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def serve_orders(path: Path, carry_out: CarryOut) -> AsyncIterator[None]:
    """Take orders at `path` while the context lasts. Leaving it ends the connections and removes the socket."""
    connections: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            if len(connections) > MAX_CONNECTIONS:
                await _say(writer, {"error": f"{MAX_CONNECTIONS} orders are under way", "kind": "UnavailableError"})
            else:
                await _serve(reader, writer, carry_out)
        except OSError as error:
            logger.info("who gave an order went away: %s", error)
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_unix_server(connected, sock=_listen(path), limit=MAX_LINE_BYTES)
    try:
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)
        _remove(path)


def _listen(path: Path) -> socket.socket:
    _remove(path)  # of a predecessor that was killed: the name is ours
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    return listener


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, carry_out: CarryOut) -> None:
    async def tell(progress: Mapping[str, Any]) -> None:
        with suppress(OSError):  # what was begun goes on
            await _say(writer, {"progress": progress})

    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            line = await reader.readline()
    except (TimeoutError, ValueError):  # ValueError: a line beyond the limit
        return
    try:
        order = json.loads(line)
        if not isinstance(order, dict):
            raise ConfigError("an order is a JSON object")
        if order.get("order") != "show":
            logger.info("order: %s", {name: value for name, value in order.items() if name != "spec"})
        answer: dict[str, Any] = {"done": await carry_out(order, tell)}
    except EngineError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        answer = {"error": f"not an order: {type(error).__name__}: {error}", "kind": "ConfigError"}
    await _say(writer, answer)


async def send_order(
    path: Path, order: Mapping[str, Any], on_progress: Callable[[Mapping[str, Any]], None] = lambda progress: None
) -> dict[str, Any]:
    """Have the cluster at `path` carry `order` out; returns what it answers.

    Raises the `EngineError` that it answered with, or `UnavailableError` if nobody answers.
    """
    limit_s = float(order.get("wait_s", 0.0)) + ANSWER_MARGIN_S
    try:
        async with asyncio.timeout(limit_s):
            return await _converse(path, order, on_progress)
    except TimeoutError:
        raise UnavailableError(f"the cluster did not answer within {limit_s:g} s") from None
    except (OSError, ValueError) as error:
        raise UnavailableError(f"the cluster takes no orders at {path}: {error}") from error


async def _converse(
    path: Path, order: Mapping[str, Any], on_progress: Callable[[Mapping[str, Any]], None]
) -> dict[str, Any]:
    reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_LINE_BYTES)
    try:
        await _say(writer, order)
        while line := await reader.readline():
            answer = json.loads(line)
            if "progress" in answer:
                on_progress(answer["progress"])
            elif "error" in answer:
                raise error_from_name(answer["kind"], answer["error"])
            else:
                return dict(answer["done"])
        raise UnavailableError("the cluster ended before it answered")
    finally:
        writer.close()


async def _say(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message, default=str).encode() + b"\n")
    await writer.drain()
