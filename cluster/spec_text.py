"""Writes a `ClusterSpec` as YAML: what `cluster.spec_file` reads back as the same spec. Defaults are left out."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from cluster.spec import ClusterSpec


def spec_text(spec: ClusterSpec) -> str:
    """In ASCII: of other characters, YAML takes some for ends of lines."""
    return yaml.safe_dump(spec_values(spec), sort_keys=False)


def spec_values(spec: ClusterSpec) -> dict[str, Any]:
    return _differences(spec, ClusterSpec())


def _differences(value: Any, default: Any) -> dict[str, Any]:
    """Fields of the dataclass `value` that are not as in `default`."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        mine, other = getattr(value, field.name), getattr(default, field.name)
        if mine == other:
            continue
        found[field.name] = _differences(mine, other) if dataclasses.is_dataclass(mine) else mine
    return found
