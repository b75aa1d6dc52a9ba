"""Which lines of a batch are done, which are to be asked for, and what is written of each. Pure: lines in, values out.

The output is the journal: one record a line, appended whole, in the order of completion. A run that finds records
skips their lines; the last record may be torn, and is cut off then. So each line has exactly one record in the end,
wherever runs were killed in between.

    input line ──▶ Ask        a request, sent as often as it takes
               ──▶ Record     what can be said without asking: a bad line, a custom_id that is used already
               ──▶ None       done by a run before
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.quoting import quoted
from engine.errors import ConfigError

URLS = ("/v1/chat/completions", "/v1/completions")
MAX_LINE_BYTES = 8 << 20
MAX_ID_CHARS = 256
_SEED_BITS = 31
"""Seeds stay small integers in every client's JSON."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of the batch."""

    line: int
    """Of the input, from 1."""
    custom_id: str
    url: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the router said, for good."""

    status: int
    request_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the output, without its end."""

    line: int
    text: bytes
    failed: bool


class _BadLine(Exception):
    def __init__(self, field: str, problem: str, code: str = "invalid_line") -> None:
        super().__init__(f"{field}: {problem}")
        self.code = code


class Ledger:
    """Owns what is known of each line of one batch. Memory: about 280 bytes a line that is done.

    Invariants: a line is done at most once; two lines that are asked for never have the same custom_id.
    """

    def __init__(self, priority: int) -> None:
        """`priority` of requests that name none."""
        self._priority = priority
        self._done: dict[int, str | None] = {}
        """By line, the custom_id of its record."""
        self._failed: set[int] = set()
        self._lines: dict[bytes, int] = {}
        """The line of each custom_id, by its digest."""

    @property
    def num_done(self) -> int:
        return len(self._done)

    @property
    def num_failed(self) -> int:
        return len(self._failed)

    def resume(self, records: Iterable[bytes]) -> None:
        """Take over the whole records of an output. Raises `ConfigError` if it is not the output of a batch."""
        for number, text in enumerate(records, 1):
            try:
                record = json.loads(text)
                line, custom_id, error = record["line"], record["custom_id"], record["error"]
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ConfigError(f"line {number} of the output is no record of a batch") from None
            if type(line) is not int or line in self._done or not (custom_id is None or isinstance(custom_id, str)):
                raise ConfigError(f"line {number} of the output is no record of a batch, or the second of its line")
            self._note(line, custom_id, failed=error is not None)

    def take(self, line: int, text: bytes) -> Ask | Record | None:
        """What to do about a line of the input; None: it is done. Lines come in order.

        Raises `ConfigError` if the output has a record of another custom_id for this line: it is of another input.
        """
        try:
            ask = self._read(line, text)
        except _BadLine as error:
            if line in self._done:
                return None
            return self._bad(line, _custom_id_of(text), error)
        if line not in self._done:
            return ask
        if self._done[line] != ask.custom_id:
            raise ConfigError(
                f"line {line} of the input is {quoted(ask.custom_id)}, but the output has "
                f"{quoted(str(self._done[line]))} for it: it is the output of another input"
            )
        return None

    def finish(self, ask: Ask, answer: Answer) -> Record:
        """The record of an answer. It counts as done from now on, so it must be written."""
        ok = answer.status == 200
        error = None if ok else _error_of(answer)
        response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
        return self._record(ask.line, ask.custom_id, response, error)

    def _read(self, line: int, text: bytes) -> Ask:
        if len(text) > MAX_LINE_BYTES:
            raise _BadLine("line", f"longer than {MAX_LINE_BYTES} bytes")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _BadLine("line", f"no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise _BadLine("line", "must be a JSON object")
        custom_id = fields.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_ID_CHARS:
            raise _BadLine("custom_id", f"must be text of 1 to {MAX_ID_CHARS} characters")
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        first = self._lines.setdefault(digest, line)
        if first != line:
            raise _BadLine("custom_id", f"{quoted(custom_id)} is that of line {first}", "duplicate_custom_id")
        if fields.get("method", "POST") != "POST":
            raise _BadLine("method", "must be POST")
        url, body = fields.get("url"), fields.get("body")
        if url not in URLS:
            raise _BadLine("url", f"must be one of {', '.join(URLS)}")
        if not isinstance(body, dict):
            raise _BadLine("body", "must be a JSON object")
        if body.get("stream"):
            raise _BadLine("body.stream", "a batch does not stream")
        # Asked again after a crash, a line gets the same answer.
        seed = int.from_bytes(digest[:4]) % (1 << _SEED_BITS)
        return Ask(line, custom_id, url, {"seed": seed, "priority": self._priority, **body})

    def _bad(self, line: int, custom_id: str | None, error: _BadLine) -> Record:
        message = f"line {line}: {error}"
        return self._record(line, custom_id, None, {"code": error.code, "message": message})

    def _record(
        self, line: int, custom_id: str | None, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None
    ) -> Record:
        self._note(line, custom_id, failed=error is not None)
        fields = {"id": f"batch_req_{line}", "custom_id": custom_id, "line": line, "response": response, "error": error}
        return Record(line, json.dumps(fields, ensure_ascii=True).encode(), error is not None)

    def _note(self, line: int, custom_id: str | None, *, failed: bool) -> None:
        assert line not in self._done, f"line {line} is done already"
        self._done[line] = custom_id
        if failed:
            self._failed.add(line)


def whole_bytes(tail: bytes) -> int:
    """Of the end of an output, how many bytes belong to whole records: what follows the last newline is torn."""
    return tail.rfind(b"\n") + 1


def _custom_id_of(text: bytes) -> str | None:
    """Of a bad line, if it has one."""
    try:
        fields = json.loads(text) if len(text) <= MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        return None
    custom_id = fields.get("custom_id") if isinstance(fields, dict) else None
    return custom_id if isinstance(custom_id, str) and len(custom_id) <= MAX_ID_CHARS else None


def _error_of(answer: Answer) -> dict[str, Any]:
    told = answer.body.get("error")
    fields = told if isinstance(told, dict) else {}
    message = fields.get("message") or f"HTTP status {answer.status}"
    return {"code": fields.get("code") or f"http_{answer.status}", "message": message}
