"""Typed reading of JSON files of a model folder, with errors that name file and field. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import ModelError

T = TypeVar("T")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError` that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; is this a model folder?") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # bad UTF-8 or bad JSON
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class Fields:
    """Typed reading of one JSON object, with errors that name file and field."""

    def __init__(self, path: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {self._prefix}{name}: {problem}")

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "missing")
            return default
        if type(value) is not kind:
            raise self.error(name, f"must be {kind.__name__}, got {value!r}")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.get(name, int, default)
        if value < 1:
            raise self.error(name, f"must be at least 1, got {value}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if type(value) not in (int, float):
            raise self.error(name, "missing" if value is None else f"must be a number, got {value!r}")
        if not 0.0 < float(value) < float("inf"):
            raise self.error(name, f"must be positive and finite, got {value}")
        return float(value)

    def number_or_none(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def refuse_unless(self, name: str, supported: object) -> None:
        """An absent field, and null, are what is supported."""
        value = self.values.get(name)
        if value is not None and value != supported:
            raise self.error(
                name, f"only {'null' if supported is None else repr(supported)} is supported, got {value!r}"
            )

    def object(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return Fields(self.path, value, prefix=f"{name}.")
