"""Writes docs/knobs.md from the table of knobs: `python -m engine.knobs_doc`."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from engine.knobs import KNOBS, Knob
from engine.sizes import format_binary_size

PATH = Path(__file__).resolve().parents[1] / "docs" / "knobs.md"
WIDTH = 120

_HEAD = """\
# The knobs of KV memory

<!-- Made by `python -m engine.knobs_doc` from engine/knobs.py. Change that file, not this one. -->

Each knob is a flag of a worker, with dashes (`python -m decode_worker --block-size 32`), and a field of a pool in a
cluster spec, with underscores (`pools: {decode: {block_size: 32}}`). Sizes are bytes or have a unit: `GB` is decimal,
`GiB` is binary. `kvrelay plan` shows what a setting does before anything is started:

```sh
kvrelay plan --model llama-3-70b --dtype float16 --memory 120GB --context 4000
```

A value out of range is refused with the range; so is, at start, a value that nothing implements yet.

| knob | type | default | range | works now |
|---|---|---|---|---|
"""


def render() -> str:
    """The whole document."""
    rows = [f"| {' | '.join(_cells(knob))} |\n" for knob in KNOBS.values()]
    return "".join((_HEAD, *rows, *map(_section, KNOBS.values())))


def _cells(knob: Knob) -> tuple[str, ...]:
    unit = f", {knob.unit}" if knob.unit else ""
    works = "all" if knob.works is None else ", ".join(_value(knob, value) for value in knob.works)
    link = f"[`{knob.name}`](#{knob.name})"
    return (link, f"{knob.kind.__name__}{unit}", _value(knob, knob.default), knob.range, works)


def _section(knob: Knob) -> str:
    high, low = ("On", "Off") if knob.kind is bool else ("Too high", "Too low")
    if knob.choices:
        high, low = "Wider", "Narrower"
    costs = [f"- {high}: {knob.too_high}", f"- {low}: {knob.too_low}"]
    if knob.too_high == knob.too_low:
        costs = [f"- {knob.too_high}"]
    if knob.works is not None:
        costs.append(f"- Not yet: {knob.instead}.")
    wrapped = (textwrap.fill(cost, WIDTH, subsequent_indent="  ") for cost in costs)
    return "\n".join(("", f"## {knob.name}", "", textwrap.fill(knob.meaning, WIDTH), "", *wrapped, ""))


def _value(knob: Knob, value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "true" if value else "false"
    return format_binary_size(value) if knob.is_size and value else str(value)


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(render(), encoding="utf-8")
    sys.stdout.write(f"{PATH}\n")
