"""YAML that somebody else wrote: whatever is wrong with it is one error, and nothing in it is run."""

from __future__ import annotations

from typing import Any

import yaml

MALFORMED = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)
"""What PyYAML raises: a value that does not fit its tag, `!!bool maybe`, gets no error of its own there."""


def read_yaml(text: str | bytes) -> Any:
    """Plain values. Raises `ValueError` for what is no YAML, or is nested too deeply."""
    try:
        return yaml.safe_load(text)
    except MALFORMED as error:
        raise ValueError(f"no YAML: {type(error).__name__}: {error}") from error
