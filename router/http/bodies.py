"""Request bodies: read within a limit and a time, and their fields read by type. Knows no endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from aiohttp import web

from engine.errors import DeadlineExceeded, RequestError
from router.validate import shortened


async def read_object(request: web.Request, limit: int, timeout_s: float) -> Fields:
    """The JSON object in the body. A body that says to be over `limit` bytes is refused unread."""
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, request.content_length)
    try:
        async with asyncio.timeout(timeout_s):
            data = await request.read()
    except TimeoutError:
        raise DeadlineExceeded(f"the request's body did not arrive within {timeout_s:g} s") from None
    try:
        value = json.loads(data, parse_constant=_no_constant)
    except RecursionError:
        raise RequestError("body", "is nested too deeply") from None
    except ValueError as error:
        raise RequestError("body", f"is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("body", f"must be a JSON object, got {kind_of(value)}")
    return Fields(value)


class Fields:
    """A JSON object. A field that is absent and one that is null are the same."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self._path = path

    def name_of(self, name: str) -> str:
        return f"{self._path}{name}"

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        if value is None:
            return default
        return value if isinstance(value, str) else self._refuse(name, "a string", value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        return value if isinstance(value, bool) else self._refuse(name, "true or false", value)

    def integer(self, name: str) -> int | None:
        value = self._values.get(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        return self._refuse(name, "an integer", value)

    def nested(self, name: str) -> Fields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self._refuse(name, "an object", value)
        return Fields(value, f"{self.name_of(name)}.")

    def nested_list(self, name: str) -> list[Fields]:
        value = self._values.get(name)
        if not isinstance(value, list):
            self._refuse(name, "a list of objects", value)
        fields = []
        for number, entry in enumerate(value):
            where = f"{name}[{number}]"
            if not isinstance(entry, dict):
                self._refuse(where, "an object", entry)
            fields.append(Fields(entry, f"{self.name_of(where)}."))
        return fields

    def _refuse(self, name: str, wanted: str, value: object) -> NoReturn:
        raise RequestError(self.name_of(name), f"must be {wanted}, got {kind_of(value)}")


def kind_of(value: object) -> str:
    """A JSON value for a message: its kind, or itself if that is short."""
    match value:
        case None:
            return "null"
        case bool() | int() | float():
            return shortened(str(value)).strip("'")
        case str():
            return shortened(value)
        case list():
            return "a list"
        case _:
            return "an object"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not in JSON")
