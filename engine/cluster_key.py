"""The secret that the processes of one cluster share, by which they know each other."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from engine.errors import ConfigError

KEY_BYTES = 32
_MAX_FILE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """Its text form is 64 hexadecimal digits. Not part of any `repr`, so of no log."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != KEY_BYTES:
            raise ConfigError(f"a cluster key has {KEY_BYTES} bytes, got {len(self.secret)}")

    @classmethod
    def generate(cls) -> ClusterKey:
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> ClusterKey:
        """Raises `ConfigError`, which does not repeat the text."""
        try:
            secret = bytes.fromhex(text.strip())
        except ValueError:
            raise ConfigError(f"a cluster key must be {2 * KEY_BYTES} hexadecimal digits") from None
        return cls(secret)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """From a file. Raises `ConfigError` naming it."""
        try:
            with path.open("rb") as file:
                return cls.parse(file.read(_MAX_FILE_BYTES).decode("ascii", "replace"))
        except OSError as error:
            raise ConfigError(f"cannot read the cluster key {path}: {error.strerror}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def session_token(self) -> str:
        """What a router shows to a worker. Whoever reads it on the way can open sessions, but learns no key."""
        return hmac.digest(self.secret, b"kvrelay session 1", sha256).hex()
