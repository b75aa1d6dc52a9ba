"""Reads a model folder's settings and works out its fingerprint. Knows files and shapes, no weights and no tokens.

A model folder has Hugging Face's layout: `config.json`, `generation_config.json` (optional), `tokenizer.json`,
`*.safetensors`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from engine.config import ModelConfig
from engine.config_fields import Fields, read_json_object
from engine.errors import ModelError
from engine.model_families import model_config

DIGEST_FILE = ".kvrelay-digest.json"


def load_model_config(folder: Path) -> ModelConfig:
    """Shape and stop tokens of the model in `folder`.

    Raises `ModelError` that names the file and the field: missing, of the wrong type, or asking for something
    that the decoder does not do.
    """
    path = folder / "config.json"
    return model_config(Fields(path, read_json_object(path)), read_eos_token_ids(folder))


def read_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end an output: of `generation_config.json`, else of `config.json`, else none."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json_object(path).get("eos_token_id") if path.exists() else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
            raise ModelError(f"{path}: eos_token_id must be a token id or a list of them, got {value!r}")
        return tuple(ids)
    return ()


def model_fingerprint(folder: Path) -> bytes:
    """32 bytes that two folders share only if they give the same KV for the same text.

    SHA-256 over the settings that `load_model_config` reads, the tokenizer file and the weights. Reads every byte
    of the weights the first time; then their digest lies in `.kvrelay-digest.json`, good for as long as names,
    sizes and times of change stay.
    """
    config = json.dumps(_settings(load_model_config(folder)), sort_keys=True, separators=(",", ":"))
    parts = (sha256(config.encode()).digest(), _digest_file(folder / "tokenizer.json"), weights_digest(folder))
    return sha256(b"kvrelay.model.v1" + b"".join(parts)).digest()


def weights_fingerprint(fingerprint: bytes, weights_dtype: str) -> bytes:
    """That of the model with its weights in another type than `dtype`: they give other KV for the same text."""
    if weights_dtype == "auto":
        return fingerprint
    return sha256(b"kvrelay.weights.v1" + fingerprint + weights_dtype.encode()).digest()


def weights_digest(folder: Path) -> bytes:
    """SHA-256 over the names and contents of the folder's safetensors files; see `model_fingerprint`."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file; pull the model again")
    states = [(path.name, path.stat()) for path in paths]
    key = [[name, state.st_size, state.st_mtime_ns] for name, state in states]
    cached = _cached_digest(folder, key)
    if cached is not None:
        return cached
    digest = sha256()
    for path in paths:
        digest.update(len(path.name.encode()).to_bytes(4, "little") + path.name.encode() + _digest_file(path))
    _cache_digest(folder, key, digest.digest())
    return digest.digest()


def _settings(config: ModelConfig) -> dict[str, Any]:
    """Without those that are as in Llama, so that a setting that is new here gives no old model a new name."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    return {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}


def _digest_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").digest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _cached_digest(folder: Path, key: list[list[Any]]) -> bytes | None:
    path = folder / DIGEST_FILE
    if not path.exists():
        return None
    try:
        entry = read_json_object(path)
        return bytes.fromhex(entry["digest"]) if entry.get("files") == key else None
    except (ModelError, KeyError, TypeError, ValueError):
        return None  # torn or foreign: worked out again and replaced


def _cache_digest(folder: Path, key: list[list[Any]], digest: bytes) -> None:
    """Best effort: a read-only folder costs a read of the weights at every start, nothing more."""
    temporary = folder / f"{DIGEST_FILE}.{uuid4().hex}"
    try:
        temporary.write_text(json.dumps({"files": key, "digest": digest.hex()}))
        os.replace(temporary, folder / DIGEST_FILE)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
