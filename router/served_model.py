"""What a router knows of its model: name, limits, identity and text. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.model_config import load_model_config, model_fingerprint
from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: int
    """Prompt and output together, in tokens. A worker may have less."""
    vocab_size: int
    """Token ids are below this."""
    fingerprint: bytes
    """Workers must have the same one."""
    tokenizer: Tokenizer
    folder: Path
    """Where all of this was read."""


def load_served_model(folder: Path, name: str) -> ServedModel:
    """Read `folder`. Raises `ModelError` saying what is missing or damaged. Blocks: call it off the event loop."""
    config = load_model_config(folder)
    return ServedModel(
        name=name,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        fingerprint=model_fingerprint(folder),
        tokenizer=Tokenizer.load(folder),
        folder=folder,
    )
