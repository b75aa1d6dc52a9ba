"""The arithmetic of KV memory: what a pool holds, before it is made. Pure: no tensor, no machine, no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import ConfigError
from engine.knobs import LARGEST, Knobs
from engine.kv_layout import KV_DTYPE_BYTES, QUANTIZED_KV_DTYPES, KvLayout
from engine.model_shapes import ModelShape
from engine.sizes import format_binary_size

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""Compared in a plan, beside the chosen one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A KV pool in numbers."""

    block_bytes: int
    block_size: int
    num_blocks: int
    dtype: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def __str__(self) -> str:
        return (
            f"{self.num_blocks:,} blocks of {self.block_size} = {self.num_tokens:,} tokens, "
            f"{format_binary_size(self.num_bytes)} of {self.dtype}"
        )


def pool_of(layout: KvLayout, memory_bytes: int, num_blocks_override: int | None = None) -> Pool:
    """Whole blocks of `layout` in `memory_bytes`, none if it is too little; or as many as the override says."""
    return Pool(
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        num_blocks=num_blocks_override or max(0, memory_bytes) // layout.block_bytes,
        dtype=layout.dtype,
    )


def check_pool(pool: Pool, knobs: Knobs, machine_bytes: int) -> None:
    """Raises `ConfigError` that names the knob to set if the pool holds no block, or this machine cannot hold it."""
    if pool.num_blocks < 1:
        raise ConfigError(f"kv_memory_bytes {knobs.kv_memory_bytes} is less than one block of {pool.block_bytes} bytes")
    if pool.num_bytes <= machine_bytes:
        return
    name, value, most = "kv_memory_bytes", knobs.kv_memory_bytes, machine_bytes
    if knobs.num_blocks_override is not None:
        name, value, most = "num_blocks_override", knobs.num_blocks_override, machine_bytes // pool.block_bytes
    raise ConfigError(
        f"{name} {value}: the KV pool, {pool}, is larger than this machine's memory of "
        f"{format_binary_size(machine_bytes)}; set {name} below {most}, and leave room for the model"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is planned: a model, the knobs, and the requests that shall be served.

    `knobs.kv_memory_bytes` is the memory of one device that the pool may take: all of it, or what weights and
    activations leave, if `weights_bytes` or `knobs.gpu_memory_utilization` say so.
    """

    shape: ModelShape
    knobs: Knobs
    dtype: str
    """Of weights and activations."""
    context_len: int
    """Tokens of one request at its longest, prompt and output together."""
    shared_prefix_len: int = 0
    """Tokens that all requests begin with."""
    weights_bytes: int = 0
    """Of the whole model; each device holds its share."""

    def __post_init__(self) -> None:
        limit, trained = self.max_model_len, self.shape.max_model_len
        for name in ("context_len", "shared_prefix_len", "weights_bytes"):
            if getattr(self, name) > LARGEST:
                raise ConfigError(f"{name.rpartition('_')[0]} must be at most 2^53")
        if trained is not None and (limit or 0) > trained:
            raise ConfigError(f"max_model_len {limit} is more than the {trained} of {self.shape.name}")
        if self.context_len < 1 or (limit is not None and self.context_len > limit):
            most = f"in [1, {limit}], the max_model_len" if limit is not None else "at least 1"
            raise ConfigError(f"context must be {most}, got {self.context_len}")
        if not 0 <= self.shared_prefix_len <= self.context_len:
            raise ConfigError(f"shared_prefix must be in [0, {self.context_len}], got {self.shared_prefix_len}")
        if self.weights_bytes < 0:
            raise ConfigError(f"weights must be at least 0, got {self.weights_bytes}")
        if self.shape.num_kv_heads % self.knobs.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {self.knobs.tensor_parallel_size} does not divide the "
                f"{self.shape.num_kv_heads} KV heads of {self.shape.name}"
            )

    @property
    def max_model_len(self) -> int | None:
        return self.knobs.max_model_len or self.shape.max_model_len

    @property
    def kv_dtype(self) -> str:
        return self.knobs.kv_dtype(self.dtype)

    @property
    def layout(self) -> KvLayout:
        """Of a block on one device, which holds its share of the heads."""
        return KvLayout(
            num_layers=self.shape.num_layers,
            num_kv_heads=self.shape.num_kv_heads // self.knobs.tensor_parallel_size,
            head_dim=self.shape.head_dim,
            block_size=self.knobs.block_size,
            dtype=self.kv_dtype,
        )

    @property
    def kv_memory_bytes(self) -> int:
        """For the pool of one device; zero or less if the weights leave nothing."""
        share = self.knobs.gpu_memory_utilization
        usable = self.knobs.kv_memory_bytes if share is None else int(self.knobs.kv_memory_bytes * share)
        return usable - -(-self.weights_bytes // self.knobs.tensor_parallel_size)

    def with_knobs(self, **knobs: Any) -> Question:
        return replace(self, knobs=replace(self.knobs, **knobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How much fits with one choice of knobs. Bytes are those of one device; tokens and requests are whole."""

    label: str
    token_bytes: int
    block_bytes: int
    num_blocks: int
    num_tokens: int
    pool_bytes: int
    blocks_per_request: int
    """Of a request at its longest, those that it shares included."""
    shared_blocks: int
    """That all requests hold together, once."""
    num_requests: int
    """At once, each at its longest."""
    refused: str
    """Why a worker refuses these knobs today; empty if it takes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """The part of a request's last block that stays empty, by block size."""

    block_size: int
    block_bytes: int
    tokens: float
    """Expected, for a request; half a block, less half a token."""
    percent: float
    """Of the memory that a request of the planned length holds."""
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    question: Question
    chosen: Fit
    alternatives: tuple[Fit, ...]
    """With one knob changed."""
    waste: tuple[Waste, ...]
    contiguous_requests: int | None
    """Requests at once if each reserved `max_model_len` tokens in one piece, as without blocks; None if that is not
    known."""
    swap_blocks: int
    """That `swap_space` holds beside the pool."""
    swap_requests: int


def make_plan(question: Question) -> Plan:
    """Raises `ConfigError` naming the field if nothing fits, or the choice contradicts itself."""
    chosen = fit(question)
    if chosen.num_blocks < 1:
        raise ConfigError(
            f"memory: {max(0, question.kv_memory_bytes)} bytes a device are left for KV, less than one block of "
            f"{chosen.block_bytes} bytes"
        )
    limit = question.max_model_len
    swap_blocks = question.knobs.swap_space // (chosen.block_bytes * question.knobs.tensor_parallel_size)
    same_memory = question if question.knobs.num_blocks_override is None else _by_memory(question, chosen.pool_bytes)
    return Plan(
        question=question,
        chosen=chosen,
        alternatives=_alternatives(same_memory),
        waste=tuple(_waste(same_memory, size) for size in sorted({*BLOCK_SIZES, question.knobs.block_size})),
        contiguous_requests=None if limit is None else chosen.num_tokens // limit,
        swap_blocks=swap_blocks,
        swap_requests=swap_blocks // chosen.blocks_per_request,
    )


def fit(question: Question, label: str = "as chosen") -> Fit:
    """What one choice of knobs holds; no block at all, if the memory is too little."""
    layout = question.layout
    pool = pool_of(layout, question.kv_memory_bytes, question.knobs.num_blocks_override)
    per_request = _blocks_per_request(question)
    shared = _shared_blocks(question)
    return Fit(
        label=label,
        token_bytes=layout.token_bytes,
        block_bytes=pool.block_bytes,
        num_blocks=pool.num_blocks,
        num_tokens=pool.num_tokens,
        pool_bytes=pool.num_bytes,
        blocks_per_request=per_request,
        shared_blocks=shared,
        num_requests=max(0, pool.num_blocks - shared) // (per_request - shared),
        refused=_refusal(question.knobs),
    )


def _refusal(knobs: Knobs) -> str:
    try:
        knobs.check_works()
    except ConfigError as error:
        return str(error)
    return ""


def _blocks_per_request(question: Question) -> int:
    size, window = question.knobs.block_size, question.knobs.sliding_window
    whole = -(-question.context_len // size)
    if window is None:
        return whole
    return min(whole, -(-(window - 1) // size) + 1)  # a window begins anywhere in its first block


def _shared_blocks(question: Question) -> int:
    """Whole blocks only, and never the last token: its step is what produces the next one."""
    knobs = question.knobs
    if not knobs.enable_prefix_caching or (knobs.sliding_window or question.context_len) < question.context_len:
        return 0
    return min(question.shared_prefix_len, question.context_len - 1) // knobs.block_size


def _by_memory(question: Question, pool_bytes: int) -> Question:
    """The same pool, given by its bytes: blocks of another size are then compared in the same memory."""
    by_memory = question.with_knobs(num_blocks_override=None, gpu_memory_utilization=None, kv_memory_bytes=pool_bytes)
    return replace(by_memory, weights_bytes=0)


def _alternatives(question: Question) -> tuple[Fit, ...]:
    """One knob changed at a time, where the change is possible and makes a difference."""
    return tuple(
        fit(question.with_knobs(**{name: value}), f"{name} {'unset' if value is None else str(value).lower()}")
        for name, value in _changes(question)
    )


def _changes(question: Question) -> Iterator[tuple[str, Any]]:
    knobs, shape = question.knobs, question.shape
    for dtype in ("bfloat16", *QUANTIZED_KV_DTYPES):
        if KV_DTYPE_BYTES[dtype] < KV_DTYPE_BYTES[question.kv_dtype]:
            yield "kv_cache_dtype", dtype
    if knobs.sliding_window is not None:
        yield "sliding_window", None
    else:
        half = 1 << (max(question.context_len // 2, 1).bit_length() - 1)
        for window in sorted({half, shape.sliding_window or half}):
            if window < question.context_len:
                yield "sliding_window", window
    for size in (1, 2, 4, 8):
        if size != knobs.tensor_parallel_size and shape.num_kv_heads % size == 0:
            yield "tensor_parallel_size", size
    if question.shared_prefix_len:
        yield "enable_prefix_caching", not knobs.enable_prefix_caching


def _waste(question: Question, block_size: int) -> Waste:
    changed = question.with_knobs(block_size=block_size)
    # Lengths end anywhere in a block with equal chance: 0 to block_size - 1 tokens stay empty.
    empty = (block_size - 1) / 2
    held = fit(changed)
    return Waste(
        block_size=block_size,
        block_bytes=held.block_bytes,
        tokens=empty,
        percent=100 * empty / (question.context_len + empty),
        num_requests=held.num_requests,
    )
