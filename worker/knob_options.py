"""Command-line options made from the table of knobs: the worker's flags, and those of `kvrelay plan`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from engine.errors import ConfigError
from engine.knobs import KNOBS
from engine.sizes import parse_size


def size_param(value: str | int) -> int:
    """As `type` of an option: bytes, as a number or as a number and a unit."""
    if isinstance(value, int):
        return value
    try:
        return parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def knob_option(name: str, *, flags: Sequence[str] = (), help_text: str = "") -> click.Option:
    """The option that sets the knob `name`, its range unchecked. `flags` and `help_text` replace those of the table."""
    knob = KNOBS[name]
    if knob.kind is bool:
        switch = f"{knob.flag}/--no-{knob.flag.removeprefix('--')}"
        return click.Option([switch], help=help_text or knob.meaning, default=knob.default, show_default=True)
    return click.Option(
        [*(flags or [knob.flag]), name],
        help=help_text or f"{knob.meaning} [{knob.range}]",
        # Choices are text here: the table refuses the others in its own words.
        type=size_param if knob.is_size else knob.kind,
        metavar=(knob.unit or "name").upper(),
        default=knob.default,
        show_default=True,
    )
