"""Finds damage in a model folder: at a glance, or byte for byte against the record written when the folder was made.

Knows files, sizes and digests; no names of models, no tensors, and not what to do about damage.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from hashlib import file_digest
from pathlib import Path
from typing import Any

from engine.config_fields import read_json_object
from engine.errors import ModelError
from engine.model_config import DIGEST_FILE

MANIFEST_FILE = ".kvrelay-manifest.json"
REQUIRED_FILES = ("config.json", "tokenizer.json")

_VERSION = 1
_MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file; the format's own limit."""


def write_manifest(folder: Path) -> None:
    """Record size and SHA-256 of every file of `folder`, in it. Raises `OSError`."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name not in (MANIFEST_FILE, DIGEST_FILE)  # the digest is worked out again whenever it is missing
    }
    (folder / MANIFEST_FILE).write_text(json.dumps({"version": _VERSION, "files": files}, indent=1))


def find_damage(folder: Path) -> str | None:
    """The first thing that is wrong in `folder` as far as names, sizes and headers tell; None if nothing is.

    Milliseconds. A folder without a manifest, one that we did not make, is judged by its safetensors headers.
    """
    try:
        for name, size in _recorded(folder, "size").items():
            if (problem := _size_problem(folder / name, int(size))) is not None:
                return problem
        for path in sorted(folder.glob("*.safetensors")):
            if (problem := find_header_damage(path)) is not None:
                return problem
    except ModelError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror}"
    return next((f"{folder / name} is missing" for name in REQUIRED_FILES if not (folder / name).is_file()), None)


def find_any_damage(folder: Path, progress: Callable[[float], None]) -> str | None:
    """Like `find_damage`, but reads every byte. A folder of ours without a manifest cannot be vouched for: damage."""
    if (problem := find_damage(folder)) is not None:
        return problem
    if not (folder / MANIFEST_FILE).exists():
        return f"{folder} has no {MANIFEST_FILE} to check it by"
    digests = _recorded(folder, "sha256")
    for done, (name, digest) in enumerate(digests.items()):
        progress(done / len(digests))
        try:
            if _sha256(folder / name) != digest:
                return f"{folder / name} holds other bytes than were written"
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
    progress(1.0)
    return None


def find_header_damage(path: Path) -> str | None:
    """Whether a safetensors file is as long as its header says: 8 bytes of length, JSON, tensors end to end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            return f"{path} is damaged: its header does not fit into its {size} bytes"
        header = file.read(length)
    try:
        tensors = json.loads(header)
        end = max((entry["data_offsets"][1] for name, entry in tensors.items() if name != "__metadata__"), default=0)
        expected = 8 + length + int(end)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path} is damaged: its header is not readable"
    return None if size == expected else f"{path} is damaged: it has {size} bytes, its header describes {expected}"


def _recorded(folder: Path, field: str) -> dict[str, Any]:
    """One field of each file in the manifest; nothing if there is no manifest. Raises `ModelError` if it is damaged."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return {}
    manifest = read_json_object(path)
    try:
        entries: dict[str, Any] = manifest["files"]
        if manifest["version"] != _VERSION or any(os.sep in name for name in entries):
            raise ValueError("of another version")
        return {
            name: {"size": int(entry["size"]), "sha256": str(entry["sha256"])}[field] for name, entry in entries.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path} is damaged") from error


def _size_problem(path: Path, expected: int) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    return None if size == expected else f"{path} is damaged: it has {size} bytes, not {expected}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
