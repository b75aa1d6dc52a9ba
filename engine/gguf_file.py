"""Reads the container of a GGUF file: metadata and tensors. Knows the format, not what a model is made of.

An own reader, because it must hold against damaged files: every length is checked against the file before it is
used. The quantisation formats themselves are the `gguf` package's.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import ModelError

T = TypeVar("T")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

_SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8"]))
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has it the other way round."""
    kind: GGMLQuantizationType
    data: Bytes  # [rows, bytes of a row], a view of the mapped file

    def dequantized(self) -> Floats:
        """The values, of `shape`, contiguous."""
        values: Floats = dequantize(self.data, self.kind)
        return np.ascontiguousarray(values, dtype=np.float32).reshape(self.shape)


class GgufFile:
    """An open GGUF file, mapped read-only for as long as this object or one of its tensors lives.

    Raises `ModelError` if the file is no GGUF, is torn, or says something impossible.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                data = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise self.damaged(str(error)) from error
        cursor = _Cursor(data)
        try:
            self.metadata, self.tensors = self._parse(cursor)
        except (struct.error, ValueError, IndexError) as error:  # ValueError has bad UTF-8 and bad enum values in it
            raise self.damaged(f"{error} (near byte {cursor.position})") from error

    def damaged(self, problem: str) -> ModelError:
        return ModelError(f"{self.path} is damaged or incomplete: {problem}; fetch the file again")

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Metadata value of `key`. Raises `ModelError` if it is missing without default, or of another type."""
        value = self.metadata.get(key, default)
        if type(value) is not kind:
            raise ModelError(f"{self.path}: {key}: " + ("missing" if value is None else f"must be {kind.__name__}"))
        return value

    def _parse(self, cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if cursor.take(4).tobytes() != b"GGUF":
            raise ModelError(f"{self.path} is no GGUF file: it does not begin with 'GGUF'")
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version} is not supported, only {_VERSIONS}")
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text()
            metadata[key] = cursor.value(cursor.number("I"))
        if metadata.get("split.count", 1) not in (0, 1):
            raise ModelError(f"{self.path} is one part of a split model; join the parts with `gguf-split --merge`")
        entries = [self._tensor_entry(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"alignment {alignment!r}")
        cursor.position += -cursor.position % alignment
        start = cursor.position
        tensors = {}
        for name, shape, kind, offset in entries:
            cursor.position = start + offset
            tensors[name] = self._tensor(cursor, name, shape, kind)
        return metadata, tensors

    @staticmethod
    def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dims = cursor.text(), cursor.number("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
        return name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")

    @staticmethod
    def _tensor(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> GgufTensor:
        values_per_group, group_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % values_per_group:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} values in groups of {values_per_group}")
        row_bytes = shape[-1] // values_per_group * group_bytes
        rows = 1
        for size in shape[:-1]:
            rows *= size
        if not rows * row_bytes:
            raise ValueError(f"tensor {name} is empty")
        data = np.frombuffer(cursor.take(rows * row_bytes), dtype=np.uint8).reshape(rows, row_bytes)
        return GgufTensor(name, shape, kind, data)


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._data):
            raise ValueError(f"{size} bytes are missing from {len(self._data) - self.position} at the end")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(code)
        return int(value)

    def text(self) -> str:
        return self.take(self.number("Q")).tobytes().decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            if kind == _STRING:
                return [self.text() for _ in range(count)]
            return self._scalars(kind, count)
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if not _SCALARS.get(kind):
            raise ValueError(f"metadata of type {kind}")
        if not count:
            return []
        dtype = np.dtype(_SCALARS[kind])
        values: list[Any] = np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return values
