"""What a router knows of its model: name, limits, identity and text. Knows no weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engine.model_config import load_model_config, model_fingerprint
from engine.tokenizer import Tokenizer
from router.public_prefixes import PublicPrefixes, load_public_prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    max_model_len: int
    """Prompt and output together, in tokens. A worker may have less."""
    vocab_size: int
    """Token ids are below this."""
    fingerprint: bytes
    """Workers must have the same one, or that of their weights in another type."""
    tokenizer: Tokenizer
    folder: Path
    """Where all of this was read."""
    public_prefixes: PublicPrefixes = field(default_factory=PublicPrefixes)
    """Beginnings of prompts that all tenants share."""


def load_served_model(folder: Path, name: str, public_prefixes: str = "") -> ServedModel:
    """Read `folder`, and the file `public_prefixes` if there is one to be. Blocks: call it off the event loop.

    Raises `ModelError` or `ConfigError` saying what is missing or damaged.
    """
    config = load_model_config(folder)
    tokenizer = Tokenizer.load(folder)
    return ServedModel(
        name=name,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        fingerprint=model_fingerprint(folder),
        tokenizer=tokenizer,
        folder=folder,
        public_prefixes=load_public_prefixes(public_prefixes, tokenizer, config.vocab_size),
    )
