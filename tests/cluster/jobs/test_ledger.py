from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.jobs.ledger import MAX_LINE_BYTES, Answer, Ask, Ledger, Record, whole_bytes
from engine.errors import ConfigError

PRIORITY = 8


def line_of(custom_id: object = "a", **changes: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    return json.dumps(fields | changes).encode()


def ask(text: bytes, line: int = 1) -> Ask:
    step = Ledger(PRIORITY).take(line, text)
    assert isinstance(step, Ask)
    return step


def bad(text: bytes, line: int = 1) -> dict[str, Any]:
    step = Ledger(PRIORITY).take(line, text)
    assert isinstance(step, Record)
    assert step.failed
    record: dict[str, Any] = json.loads(step.text)
    return record


def test_a_line_becomes_a_request_of_the_lowest_priority_with_a_seed_of_its_own() -> None:
    first, again, other = ask(line_of("a")), ask(line_of("a"), line=9), ask(line_of("b"))
    assert (first.custom_id, first.url) == ("a", "/v1/completions")
    assert (first.body["prompt"], first.body["priority"]) == ("hi", 8)
    assert first.body["seed"] == again.body["seed"] != other.body["seed"]


def test_what_the_line_says_itself_is_left_alone() -> None:
    body = ask(line_of(body={"prompt": "x", "seed": 1, "priority": 2})).body
    assert (body["seed"], body["priority"]) == (1, 2)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"{", "line"),
        (b"[]", "line"),
        (b"\xff", "line"),
        (b"[" * 100_000, "line"),
        (b" " * (MAX_LINE_BYTES + 1), "line"),
        (line_of(""), "custom_id"),
        (line_of("x" * 257), "custom_id"),
        (line_of(custom_id=7), "custom_id"),
        (line_of(method="GET"), "method"),
        (line_of(url="/v1/embeddings"), "url"),
        (line_of(body=[]), "body"),
        (line_of(body={"stream": True}), "body.stream"),
    ],
)
def test_a_bad_line_is_recorded_with_its_number_and_field(text: bytes, field: str) -> None:
    record = bad(text, line=3)
    assert (record["line"], record["response"], record["error"]["code"]) == (3, None, "invalid_line")
    assert record["error"]["message"].startswith(f"line 3: {field}: ")


def test_a_custom_id_that_is_used_already_is_refused_naming_the_line() -> None:
    ledger = Ledger(PRIORITY)
    ledger.take(1, line_of("a"))
    second = ledger.take(2, line_of("a"))
    assert isinstance(second, Record)
    error = json.loads(second.text)["error"]
    assert error == {"code": "duplicate_custom_id", "message": "line 2: custom_id: 'a' is that of line 1"}


@pytest.mark.parametrize(("status", "failed"), [(200, False), (400, True), (500, True)])
def test_an_answer_is_recorded_as_it_came(status: int, failed: bool) -> None:
    ledger = Ledger(PRIORITY)
    step = ledger.take(1, line_of("a"))
    assert isinstance(step, Ask)
    body: dict[str, Any] = {"error": {"message": "no", "code": "c"}} if failed else {"choices": []}
    record = ledger.finish(step, Answer(status, "r", body))
    fields = json.loads(record.text)
    assert fields["response"] == {"status_code": status, "request_id": "r", "body": body}
    assert fields["error"] == ({"code": "c", "message": "no"} if failed else None)
    assert (ledger.num_done, ledger.num_failed) == (1, int(failed))


@pytest.mark.parametrize("text", [b"{}", b"1", b"no json", b'{"line": 1, "custom_id": 2, "error": null}'])
def test_an_output_that_is_none_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="line 1 of the output is no record of a batch"):
        Ledger(PRIORITY).resume([text])


def test_the_output_of_another_input_is_refused() -> None:
    ledger = Ledger(PRIORITY)
    step = ledger.take(1, line_of("a"))
    assert isinstance(step, Ask)
    record = ledger.finish(step, Answer(200, "r", {}))
    later = Ledger(PRIORITY)
    later.resume([record.text])
    with pytest.raises(ConfigError, match="line 1 of the input is 'b', but the output has 'a'"):
        later.take(1, line_of("b"))


@pytest.mark.parametrize(("tail", "whole"), [(b"", 0), (b"a", 0), (b"a\n", 2), (b"a\nb", 2), (b"a\nb\n", 4)])
def test_what_follows_the_last_newline_is_torn(tail: bytes, whole: int) -> None:
    assert whole_bytes(tail) == whole


def run_until_killed(
    lines: list[bytes], output: bytes, rng: random.Random, at_once: int, die_after: int | None
) -> bytes:
    """One run: asks several at once, gets answers in any order; it dies when it has written `die_after` bytes."""
    output = output[: whole_bytes(output)]
    ledger, written, flying = Ledger(PRIORITY), b"", list[Ask]()
    ledger.resume(output.splitlines())

    def records() -> Iterable[Record]:
        for number, text in enumerate(lines, 1):
            step = ledger.take(number, text)
            if isinstance(step, Record):
                yield step
            elif step is not None:
                flying.append(step)
            while len(flying) >= at_once:
                yield land()
        while flying:
            yield land()

    def land() -> Record:
        return ledger.finish(flying.pop(rng.randrange(len(flying))), Answer(rng.choice([200, 400]), "r", {}))

    for record in records():
        written += record.text + b"\n"
        if die_after is not None and len(written) >= die_after:
            return output + written[:die_after]
    return output + written


@settings(max_examples=200, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(["good", "bad", "duplicate", "no json"]), max_size=20),
    deaths=st.lists(st.integers(0, 2000), max_size=5),
    at_once=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_wherever_runs_die_each_line_has_exactly_one_record(
    kinds: list[str], deaths: list[int], at_once: int, seed: int
) -> None:
    lines = []
    for number, kind in enumerate(kinds):
        name = "first" if kind == "duplicate" else f"id-{number}"
        lines.append({"bad": line_of(name, url="/"), "no json": b"{"}.get(kind, line_of(name)))
    output, rng = b"", random.Random(seed)
    for death in deaths:
        output = run_until_killed(lines, output, rng, at_once, death)
    output = run_until_killed(lines, output, rng, at_once, None)

    records = [json.loads(text) for text in output.splitlines()]
    assert sorted(record["line"] for record in records) == list(range(1, len(lines) + 1))
    answered = [record["custom_id"] for record in records if record["response"] is not None]
    assert len(answered) == len(set(answered)) == len({*kinds} & {"duplicate"}) + kinds.count("good")
    assert run_until_killed(lines, output, rng, at_once, None) == output
