"""Reads a `ClusterSpec` from YAML. Every complaint says file, line and field path; nothing is guessed or dropped."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from cluster.quoting import quoted, shortened
from cluster.spec import ClusterSpec
from engine.errors import ConfigError
from engine.knobs import KNOBS, LARGEST
from engine.sizes import parse_size
from engine.yaml_text import MALFORMED

MAX_FILE_BYTES = 1024 * 1024

_TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}

SpecT = TypeVar("SpecT")


def load_spec(path: Path) -> ClusterSpec:
    """Raises `ConfigError` with `path`, line and field path; an empty file is the default spec."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: {len(data)} bytes, a spec has at most {MAX_FILE_BYTES}")
    return parse_spec(data, str(path))


def parse_spec(data: bytes | str, source: str) -> ClusterSpec:
    """Like `load_spec`; `source` stands for the file's name in errors."""
    try:
        root = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{source}:{line}: not valid YAML: {shortened(str(error.problem))}") from error
    except MALFORMED as error:
        raise ConfigError(f"{source}: not valid YAML: {shortened(str(error))}") from error
    if root is None:
        return ClusterSpec()
    return _Reader(source).read(ClusterSpec, root, "")


class _Reader:
    """Builds frozen dataclasses from YAML nodes: the nodes, unlike the values, know their lines."""

    def __init__(self, source: str) -> None:
        self._source = source

    def read(self, spec_type: type[SpecT], node: yaml.Node, path: str) -> SpecT:
        """`path` is that of `node`, empty at the top."""
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, path, f"expected a mapping, got {_describe(node)}")
        hints = typing.get_type_hints(spec_type)
        known = {field.name: hints[field.name] for field in dataclasses.fields(spec_type)}  # type: ignore[arg-type]
        nodes: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            name = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else _describe(key_node)
            where = f"{path}.{shortened(name)}" if path else shortened(name)
            if name not in known:
                raise self._error(key_node, where, "unknown field" + _suggest(name, known))
            if name in nodes:
                raise self._error(key_node, where, "given twice")
            nodes[name] = value_node
        values = {
            name: self._value(known[name], value, f"{path}.{name}" if path else name) for name, value in nodes.items()
        }
        try:
            return spec_type(**values)
        except ConfigError as error:
            # The checks of our dataclasses begin with the name of the field that they refuse.
            first = re.split(r"\W", str(error), maxsplit=1)[0]
            raise self._error(nodes.get(first, node), path, str(error)) from error

    def _value(self, wanted: Any, node: yaml.Node, path: str) -> Any:
        if dataclasses.is_dataclass(wanted):
            return self.read(typing.cast(type, wanted), node, path)
        optional = isinstance(wanted, types.UnionType)
        kind: type = next(arm for arm in typing.get_args(wanted) if arm is not types.NoneType) if optional else wanted
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, path, f"expected {_TYPE_NAMES[kind]}, got {_describe(node)}")
        try:
            value = yaml.SafeLoader("").construct_object(node)
        except MALFORMED:  # a tag that we do not know, a date that there is not
            raise self._error(node, path, f"expected {_TYPE_NAMES[kind]}, got {_describe(node)}") from None
        if value is None and optional:
            return None
        if kind is int and isinstance(value, str) and _is_size(path.rpartition(".")[2]):
            try:
                return parse_size(value)
            except ConfigError as error:
                raise self._error(node, path, str(error)) from error
        if type(value) is int and abs(value) > LARGEST:
            raise self._error(node, path, "a number must be at most 2^53 in size")
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is float and not math.isfinite(value):
            raise self._error(node, path, f"a number must be finite, got {_describe(node)}")
        if type(value) is not kind:  # `is`: YAML's true must not pass for 1
            raise self._error(node, path, f"expected {_TYPE_NAMES[kind]}, got {_describe(node)}")
        return value

    def _error(self, node: yaml.Node, path: str, message: str) -> ConfigError:
        line = node.start_mark.line + 1 if node.start_mark else 1
        return ConfigError(f"{self._source}:{line}: {path + ': ' if path else ''}{message}")


def _is_size(name: str) -> bool:
    return name.endswith("_bytes") or (name in KNOBS and KNOBS[name].is_size)


def _describe(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return quoted(node.value) if node.value else "nothing"


def _suggest(name: str, known: dict[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
