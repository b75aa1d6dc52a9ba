"""How the bytes of one KV block are laid out. Knows no tensor, so that routers and links can compare layouts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from engine.config import DTYPE_BYTES
from engine.errors import ConfigError

QUANTIZED_KV_DTYPES = ("fp8_e4m3", "int8")
KV_DTYPE_BYTES = {**DTYPE_BYTES, **dict.fromkeys(QUANTIZED_KV_DTYPES, 1)}
"""Bytes of one value, by KV type. A quantized type has scales beside its values."""

CONVERTIBLE_BLOCK_SIZES = (8, 16, 32)

_SCALE_BYTES = 4
_ALIGNMENT = 64
"""Bytes: a cache line. Vector loads and device copies want no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """A block is its values, `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`, contiguous.

    One block is one piece of memory across all layers, so it moves in one copy; heads are outermost inside a
    layer's part, so a slice of the heads is contiguous there.

    In a quantized type the block ends with scales, `[num_layers, 2, num_kv_heads]` float32: it is complete by itself,
    wherever it is copied. They stand behind all values, not beside those that they belong to, so that values lie as
    in the other types: evenly spaced and aligned, and a slice of the heads is contiguous in both parts. Both parts
    begin at a multiple of 64 bytes, and so does the next block.

    A rank of a tensor-parallel worker holds a slice of the model's heads. `num_kv_heads` are those in the block.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    heads_before: int = 0
    """KV heads of the model that lower ranks hold."""
    heads_after: int = 0
    """KV heads of the model that higher ranks hold."""

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPE_BYTES:
            raise ConfigError(f"KV dtype must be one of {sorted(KV_DTYPE_BYTES)}, got {self.dtype!r}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("heads_before", "heads_after"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")

    @property
    def total_kv_heads(self) -> int:
        """Of the model."""
        return self.heads_before + self.num_kv_heads + self.heads_after

    @property
    def heads(self) -> range:
        """Which of the model's KV heads are in the block."""
        return range(self.heads_before, self.heads_before + self.num_kv_heads)

    def shard(self, rank: int, num_ranks: int) -> KvLayout:
        """The layout of one of `num_ranks` equal shards of a whole layout.

        Raises `ConfigError` if the heads cannot be shared out evenly, or there is no such rank.
        """
        if not 0 <= rank < num_ranks or self.num_kv_heads % num_ranks or self.total_kv_heads != self.num_kv_heads:
            raise ConfigError(f"{self.num_kv_heads} KV heads have no equal shard {rank} of {num_ranks}")
        heads = self.num_kv_heads // num_ranks
        before = rank * heads
        return replace(self, num_kv_heads=heads, heads_before=before, heads_after=self.num_kv_heads - before - heads)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def quantized(self) -> bool:
        return self.dtype in QUANTIZED_KV_DTYPES

    @property
    def values_bytes(self) -> int:
        """Of a block's values: 2 x layers x kv heads x block size x head dim x bytes. They come first."""
        return math.prod(self.shape) * KV_DTYPE_BYTES[self.dtype]

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """Of a block's scales, in a quantized type."""
        return self.shape[:3]

    @property
    def scales_bytes(self) -> int:
        return math.prod(self.scales_shape) * _SCALE_BYTES if self.quantized else 0

    @property
    def scales_offset(self) -> int:
        """Bytes from the start of a block to its scales, in a quantized type."""
        return _aligned(self.values_bytes)

    @property
    def block_bytes(self) -> int:
        if not self.quantized:
            return self.values_bytes
        return _aligned(self.scales_offset + self.scales_bytes)

    @property
    def token_bytes(self) -> int:
        """A token's part of its block, rounded up. Without scales: 2 x layers x kv heads x head dim x bytes."""
        return -(-self.block_bytes // self.block_size)

    def to_wire(self) -> dict[str, Any]:
        """Without the fields of a shard unless it is one, so that peers understand it that know no shards."""
        fields = asdict(self)
        if self.total_kv_heads == self.num_kv_heads:
            del fields["heads_before"], fields["heads_after"]
        return fields

    @classmethod
    def from_wire(cls, fields: dict[str, Any]) -> KvLayout:
        """The inverse of `to_wire`. Raises `ConfigError` on missing, unknown or ill-typed fields."""
        expected = {"num_layers": int, "num_kv_heads": int, "head_dim": int, "block_size": int, "dtype": str}
        if "heads_before" in fields or "heads_after" in fields:
            expected |= {"heads_before": int, "heads_after": int}
        if fields.keys() != expected.keys():
            raise ConfigError(f"KV layout has fields {sorted(fields)}, expected {sorted(expected)}")
        for name, kind in expected.items():
            if type(fields[name]) is not kind:
                raise ConfigError(f"KV layout field {name} must be {kind.__name__}, got {fields[name]!r}")
        return cls(**fields)

    @classmethod
    def from_message(cls, message: object) -> KvLayout:
        """Of a message with our fields as attributes, of our types. Raises `ConfigError` on values out of range."""
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})


def compatible(source: KvLayout, target: KvLayout) -> str | None:
    """Why no block of `target` can be made of blocks of `source`; None if it can. Names the field."""
    for name in ("num_layers", "head_dim", "dtype", "total_kv_heads"):
        if (ours := getattr(source, name)) != (theirs := getattr(target, name)):
            return f"{name} is {ours!r} and {theirs!r}: KV of another model or type cannot be converted"
    if not set(target.heads) <= set(source.heads):
        return (
            f"num_kv_heads: a block with heads {_span(target.heads)} cannot be made of one with {_span(source.heads)}, "
            "as a block comes from one sender"
        )
    if source.block_size == target.block_size:
        return None
    sizes = f"block_size is {source.block_size} and {target.block_size}"
    if source.quantized:
        return f"{sizes}: a block of {source.dtype} has one scale for all its tokens, so it cannot be cut or joined"
    if not {source.block_size, target.block_size} <= set(CONVERTIBLE_BLOCK_SIZES):
        return f"{sizes}: only {', '.join(map(str, CONVERTIBLE_BLOCK_SIZES))} can be converted"
    return None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _span(heads: range) -> str:
    return f"{heads.start} to {heads.stop - 1}"
