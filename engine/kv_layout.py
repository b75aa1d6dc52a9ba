"""How the bytes of one KV block are laid out. Knows no tensor, so that routers and links can compare layouts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from engine.config import DTYPE_BYTES
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Shape of a block: `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`, contiguous.

    One block is one piece of memory across all layers, so it moves in one copy; heads are outermost inside a
    layer's part, so a slice of the heads is contiguous there.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token: 2 x layers x kv heads x head dim x bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> KvLayout:
        """The inverse of `to_wire`. Raises `ConfigError` on missing, unknown or ill-typed fields."""
        expected = {"num_layers": int, "num_kv_heads": int, "head_dim": int, "block_size": int, "dtype": str}
        if fields.keys() != expected.keys():
            raise ConfigError(f"KV layout has fields {sorted(fields)}, expected {sorted(expected)}")
        for name, kind in expected.items():
            if type(fields[name]) is not kind:
                raise ConfigError(f"KV layout field {name} must be {kind.__name__}, got {fields[name]!r}")
        return cls(**fields)
