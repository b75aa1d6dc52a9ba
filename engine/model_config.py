"""Reads a model folder's settings and works out its fingerprint. Knows files and shapes, no weights and no tokens.

A model folder has Hugging Face's layout: `config.json`, `generation_config.json` (optional), `tokenizer.json`,
`*.safetensors`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from engine.config import ModelConfig, RopeScaling
from engine.errors import ConfigError, ModelError

T = TypeVar("T")
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
DIGEST_FILE = ".kvrelay-digest.json"


def load_model_config(folder: Path) -> ModelConfig:
    """Shape and stop tokens of the model in `folder`.

    Raises `ModelError` that names the file and the field: missing, of the wrong type, or asking for something
    that the decoder does not do.
    """
    fields = _Fields(folder / "config.json", read_json_object(folder / "config.json"))
    architectures = fields.get("architectures", list, [])
    if not any(name in SUPPORTED_ARCHITECTURES for name in architectures):
        found = ", ".join(map(str, architectures)) or "none"
        raise fields.error("architectures", f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}; found: {found}")
    fields.refuse_unless("hidden_act", "silu")
    fields.refuse_unless("attention_bias", False)
    fields.refuse_unless("mlp_bias", False)
    fields.refuse_unless("quantization_config", None)
    hidden_size, num_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    rope = _rope_fields(fields)
    try:
        return ModelConfig(
            vocab_size=fields.positive("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=fields.positive("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=fields.positive("head_dim", hidden_size // num_heads),
            max_model_len=fields.positive("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope_theta=rope.number("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            tie_word_embeddings=fields.get("tie_word_embeddings", bool, False),
            eos_token_ids=read_eos_token_ids(folder),
            bos_token_id=None if fields.values.get("bos_token_id") is None else fields.get("bos_token_id", int),
        )
    except ConfigError as error:
        raise ModelError(f"{fields.path}: {error}") from error


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
    config = json.dumps(asdict(load_model_config(folder)), sort_keys=True, separators=(",", ":"))
    parts = (sha256(config.encode()).digest(), _digest_file(folder / "tokenizer.json"), weights_digest(folder))
    return sha256(b"kvrelay.model.v1" + b"".join(parts)).digest()


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


class _Fields:
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

    def refuse_unless(self, name: str, supported: object) -> None:
        value = self.values.get(name, supported)
        if value != supported:
            raise self.error(name, f"only {supported!r} is supported, got {value!r}")

    def object(self, name: str) -> _Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r}")
        return _Fields(self.path, value, prefix=f"{name}.")


def _rope_fields(fields: _Fields) -> _Fields:
    """Where the rotary settings are: `rope_parameters` since transformers 5, before that spread over the file."""
    return fields.object("rope_parameters") or fields


def _rope_scaling(rope: _Fields) -> RopeScaling | None:
    scaling = rope.object("rope_scaling") or rope
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise scaling.error("rope_type", f"supported: default, llama3; found: {kind!r}")
    return RopeScaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position_embeddings=scaling.positive("original_max_position_embeddings"),
    )


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
        temporary.unlink(missing_ok=True)
