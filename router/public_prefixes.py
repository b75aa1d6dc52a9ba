"""Beginnings of prompts that are declared public, such as a system prompt of all tenants: their KV is kept once.

What a prompt has in common with one of them, from its first token on, is public, whoever sends it; clients cannot name
anything. The file, YAML, is a list, the same for all routers of a cluster:

    - system: You are a helpful assistant.    # as the model's chat template renders it, and what follows it there
    - text: "Once upon a time"                # of a plain prompt
    - token_ids: [1, 2, 3]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.block_hash import TOKEN_BYTES, pack_tokens
from engine.errors import ConfigError, EngineError
from engine.tokenizer import ChatMessage, Tokenizer
from engine.yaml_text import read_yaml

MAX_PREFIXES = 64
MAX_FILE_BYTES = 8 * 1024 * 1024


class PublicPrefixes:
    def __init__(self, prefixes: Sequence[bytes] = ()) -> None:
        """Token ids, as `pack_tokens` makes them."""
        self._prefixes = tuple(prefixes)

    def num_leading(self, token_ids: bytes) -> int:
        """How many tokens the prompt begins with that a declared prefix begins with too."""
        return max((_num_common(prefix, token_ids) for prefix in self._prefixes), default=0)


def load_public_prefixes(path: str, tokenizer: Tokenizer, vocab_size: int) -> PublicPrefixes:
    """Read the file, if there is one to be. Raises `ConfigError` that names file and entry."""
    if not path:
        return PublicPrefixes()
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"public prefixes: {path} has more than {MAX_FILE_BYTES} bytes")
        document = read_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"public prefixes: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"public prefixes: {path} is {error}") from error
    if not isinstance(document, list) or not 1 <= len(document) <= MAX_PREFIXES:
        raise ConfigError(f"public prefixes: {path} must be a list of 1 to {MAX_PREFIXES}")
    prefixes = []
    for number, entry in enumerate(document):
        try:
            prefixes.append(_read_entry(entry, tokenizer, vocab_size))
        except EngineError as error:
            raise ConfigError(f"public prefixes: {path}: [{number}]: {error}") from error
    return PublicPrefixes(prefixes)


def _read_entry(entry: Any, tokenizer: Tokenizer, vocab_size: int) -> bytes:
    if not isinstance(entry, dict) or len(entry) != 1:
        raise ConfigError("must have one of system, text and token_ids, and nothing else")
    ((kind, value),) = entry.items()
    if kind == "token_ids" and isinstance(value, list) and value:
        if not all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in value):
            raise ConfigError(f"token_ids must be integers in [0, {vocab_size})")
        return pack_tokens(value)
    if not isinstance(value, str) or not value or kind not in ("system", "text"):
        raise ConfigError(
            "must have one of system and text, a text that is not empty, or token_ids, a list of integers"
        )
    if kind == "text":
        return pack_tokens(tokenizer.encode(value))
    rendered = tokenizer.render_chat([ChatMessage("system", value), ChatMessage("user", "")])
    return pack_tokens(tokenizer.encode_rendered(rendered))


def _num_common(prefix: bytes, token_ids: bytes) -> int:
    """Tokens that both begin with, by halves: a comparison of bytes is cheap, one of tokens is not."""
    low, high = 0, min(len(prefix), len(token_ids)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        part = slice(low * TOKEN_BYTES, middle * TOKEN_BYTES)
        if prefix[part] == token_ids[part]:
            low = middle
        else:
            high = middle - 1
    return low
