"""Request bodies: read within limits and a time, and their fields read by type. Knows no endpoint."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from aiohttp import web

from engine.errors import DeadlineExceeded, QueueFull, RequestError
from router.tenants import ANYBODY, Tenant
from router.validate import shortened

MAX_TOTAL_BYTES = 64 * 1024 * 1024
"""Of all bodies that are being read, or were read and are not yet a call; or one body, if that may be longer."""
TENANT_SHARE = 2
"""Where there are tenants, one of them may have one part in so many of that; or one body."""
LARGE_BYTES = 256 * 1024
"""Longer bodies are counted before they are parsed, away from the event loop and one at a time."""
MAX_VALUES = 1024 * 1024
"""In a large body, such as token ids. What follows bounds the interpreter's time for any body: it depends on these
numbers far more than on bytes, and a thread that parses keeps the event loop waiting."""
MAX_CONTAINERS = 16 * 1024
"""Lists and objects: enough for the longest chat."""
MAX_STRINGS = 64 * 1024
"""Names of fields too."""
ENCODINGS = ("identity", "gzip", "deflate")
PIECE_BYTES = 256 * 1024
"""Of a compressed body, unpacked before others have a turn."""


class BodyReader:
    """Owns the bytes of the bodies that are in flight.

    Invariant: `_in_flight` is what the `read` blocks that run have taken in, by tenant.
    """

    def __init__(self, max_body_bytes: int, timeout_s: float) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_total = max(MAX_TOTAL_BYTES, max_body_bytes)
        self._timeout_s = timeout_s
        self._max_share = max(self._max_total // TENANT_SHARE, max_body_bytes)
        self._in_flight: Counter[str] = Counter()
        self._parsing = asyncio.Lock()

    @asynccontextmanager
    async def read(
        self, request: web.Request, tenant: Tenant = ANYBODY, limit: int | None = None
    ) -> AsyncIterator[Fields]:
        """The JSON object in the body, for use inside the block. A body that says to be over the limit, in bytes, is
        refused unread. Raises `QueueFull` if too much is in flight, of all or of the tenant."""
        limit = self._max_body_bytes if limit is None else min(limit, self._max_body_bytes)
        if request.content_length is not None and request.content_length > limit:
            raise _too_large(limit, request.content_length)
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding not in ENCODINGS:
            raise RequestError("Content-Encoding", f"must be one of {', '.join(ENCODINGS)}, got {shortened(encoding)}")
        data = bytearray()
        try:
            await self._receive(request, tenant, data, limit, encoding)
            yield await self._parse(bytes(data))
        finally:
            self._in_flight[tenant.name] -= len(data)
            if not self._in_flight[tenant.name]:
                del self._in_flight[tenant.name]

    async def _receive(self, request: web.Request, tenant: Tenant, data: bytearray, limit: int, encoding: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                async for piece in _pieces(request, encoding):
                    if len(data) + len(piece) > limit:
                        raise _too_large(limit, len(data) + len(piece))
                    self._check_room(tenant, len(piece))
                    self._in_flight[tenant.name] += len(piece)
                    data += piece
        except TimeoutError:
            raise DeadlineExceeded(f"the request's body did not arrive within {self._timeout_s:g} s") from None
        except web.RequestPayloadError:
            request.content.feed_eof()  # or aiohttp would read on behind our answer, and log the same error as a fault
            raise RequestError("body", _WRONGLY_ENCODED) from None
        except zlib.error:
            raise RequestError("body", _WRONGLY_ENCODED) from None

    def _check_room(self, tenant: Tenant, num_bytes: int) -> None:
        if self._in_flight.total() + num_bytes > self._max_total:
            raise QueueFull(f"the bodies in flight may be {self._max_total} bytes; try again later")
        if tenant is not ANYBODY and self._in_flight[tenant.name] + num_bytes > self._max_share:
            raise QueueFull(f"the bodies in flight of one tenant may be {self._max_share} bytes; try again later")

    async def _parse(self, data: bytes) -> Fields:
        if len(data) <= LARGE_BYTES:
            return parse_object(data)
        async with self._parsing:
            return await asyncio.to_thread(_parse_large, data)


def _too_large(limit: int, num_bytes: int) -> web.HTTPRequestEntityTooLarge:
    text = f"body: at most {limit} bytes (max_request_bytes of the router), got {num_bytes} or more"
    return web.HTTPRequestEntityTooLarge(limit, num_bytes, text=text)


_WRONGLY_ENCODED = "is not encoded as its Content-Encoding or Transfer-Encoding says"


async def _pieces(request: web.Request, encoding: str) -> AsyncIterator[bytes]:
    """Of the body, unpacked. Raises `zlib.error` for one that does not end where its encoding says."""
    unpacker: zlib._Decompress | None = None
    while packed := await request.content.readany():
        if encoding == "identity":
            yield packed
            continue
        unpacker = unpacker or zlib.decompressobj(_window_bits(encoding, packed[0]))
        while packed:
            yield unpacker.decompress(packed, PIECE_BYTES)
            packed = unpacker.unconsumed_tail
            if packed:
                await asyncio.sleep(0)
    if unpacker is not None and (unpacker.unused_data or not unpacker.eof):
        raise zlib.error("incomplete, or followed by something else")


def _window_bits(encoding: str, first: int) -> int:
    """As `zlib` wants to be told of the format. Some send `deflate` without the header that it has by its name."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    return zlib.MAX_WBITS if first & 0xF == zlib.DEFLATED else -zlib.MAX_WBITS


def _parse_large(data: bytes) -> Fields:
    check_counts(data)
    return parse_object(data)


def check_counts(data: bytes) -> None:
    """Raises `RequestError` if JSON `data` holds more than any request needs. In time linear in its length."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    _at_most("strings", plain.count(b'"') // 2, MAX_STRINGS)
    structure = b"".join(plain.split(b'"')[::2])
    _at_most("lists and objects", structure.count(b"[") + structure.count(b"{"), MAX_CONTAINERS)
    _at_most("values", structure.count(b","), MAX_VALUES)


def _at_most(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError("body", f"at most {limit} {what}, got {count}")


def parse_object(data: bytes) -> Fields:
    try:
        value = _DECODER.decode(data.decode(json.detect_encoding(data), "surrogatepass"))
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

    def nested_list(self, name: str, limit: int) -> list[Fields]:
        value = self._values.get(name)
        if not isinstance(value, list):
            self._refuse(name, "a list of objects", value)
        if len(value) > limit:
            raise RequestError(self.name_of(name), f"at most {limit}, got {len(value)}")
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


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
