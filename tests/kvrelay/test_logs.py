"""Log lines: JSON where asked, with the fields of the call."""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from kvrelay._logs import JsonFormatter, log_fields


def line(message: str = "said %d", *args: object, **extra: object) -> dict[str, object]:
    record = logging.getLogger("any").makeRecord("any", logging.INFO, "f", 1, message, args or (7,), None, extra=extra)
    told: dict[str, object] = json.loads(JsonFormatter("router-1").format(record))
    return told


def test_a_record_is_one_json_object_with_the_fields_around_it() -> None:
    with log_fields(request_id="acme/r"), log_fields(trace_id="t\n"):
        told = line(fields={"seconds": 0.5})
    assert told.pop("time")
    assert told == {
        "level": "INFO",
        "logger": "any",
        "process": "router-1",
        "message": "said 7",
        "request_id": "acme/r",
        "trace_id": "t\n",
        "seconds": 0.5,
    }
    assert "request_id" not in line()


async def test_fields_belong_to_the_task_that_set_them() -> None:
    async def call(name: str) -> object:
        with log_fields(request_id=name):
            await asyncio.sleep(0)
            return line()["request_id"]

    assert await asyncio.gather(*(call(name) for name in "abc")) == ["a", "b", "c"]


def test_a_fault_has_its_traceback_and_stays_on_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.getLogger("any").makeRecord("any", logging.ERROR, "f", 1, "bad", (), sys.exc_info())
    text = JsonFormatter("w").format(record)
    assert "\n" not in text
    assert "ValueError: two" in json.loads(text)["error"]
