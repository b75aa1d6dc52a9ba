"""Settings of one engine: frozen, keyword-only, checked once, no value that means 'not yet known'."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.knobs import KNOBS, Knobs

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight or an activation, by the name of its type. Those of KV: `engine.kv_layout.KV_DTYPE_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """Positions that the model was trained for; prompt and output together."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How KV memory is cut into blocks. Two workers exchange blocks only if they agree on `block_size`."""

    num_blocks: int
    """Blocks in the pool. Worked out before this object is built."""
    block_size: int = 16
    """Tokens per block: a power of two. Larger wastes more of each last block and shares less."""
    enable_prefix_caching: bool = True
    """Keep finished blocks under their content hash until the memory is wanted."""
    sliding_window: int | None = None
    """Tokens that attention looks back on; blocks that hold none of them are given back. None: all of them."""
    max_pinned_share: float = 0.25
    """Of the pool, what pinned prefixes may keep from eviction. Higher: less for requests, which then wait longer."""

    def __post_init__(self) -> None:
        KNOBS["block_size"].check(self.block_size)
        KNOBS["sliding_window"].check(self.sliding_window)
        if not 0.0 <= self.max_pinned_share < 1.0:
            raise ConfigError(f"max_pinned_share must be in [0, 1), got {self.max_pinned_share}")
        if self.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {self.num_blocks}")

    @property
    def max_pinned_blocks(self) -> int:
        return int(self.num_blocks * self.max_pinned_share)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


PREEMPTIONS = ("recompute", "swap")
KERNELS = ("auto", "native", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_batched_tokens: int = 512
    """Tokens of one step: decode tokens first, prefill chunks with what is left."""
    max_num_seqs: int = 64
    """Requests that may run at once."""
    max_waiting: int = 1024
    """Requests that may wait; one more is refused with `QueueFull`."""
    preemption: str = "recompute"
    """What becomes of the KV of a request that gives way: "recompute" drops what the prefix cache does not keep; "swap"
    copies it to host memory (`swap_space`) and back, and drops it only if there is no room."""
    priority_step_s: float = 10.0
    """Seconds without a turn after which the requests of a tenant and priority compete as those of the next better
    priority. Lower: priorities mean less. Higher: a low one may wait longer."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.preemption not in PREEMPTIONS:
            raise ConfigError(f"preemption must be one of {', '.join(PREEMPTIONS)}, got {self.preemption!r}")
        if not 1e-3 <= self.priority_step_s <= 1e9:
            raise ConfigError(f"priority_step_s must be in [0.001, 1e9] seconds, got {self.priority_step_s}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} cannot give each of "
                f"max_num_seqs {self.max_num_seqs} requests its decode token"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Knobs):
    """Everything one engine is built from; the knobs of KV memory are described in `engine.knobs`."""

    model_path: str
    """Folder in the standard layout; see `engine.model.registry`."""
    dtype: str = "bfloat16"
    """Of weights and activations."""
    scheduler: SchedulerConfig = SchedulerConfig()
    num_threads: int = 1
    """Of the kernels. One a worker: prefill and decode share a small machine without fighting."""
    native_cache: str | None = None
    """Folder for the libraries that `engine.native` compiles at the first start. None: run without them."""
    kernels: str = "auto"
    """Who computes: "native" code, compiled for this CPU; the plain PyTorch "reference"; or "auto", which is native
    where that can run the model, and says why where it cannot."""

    def __post_init__(self) -> None:
        Knobs.__post_init__(self)
        self.check_works()
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.scheduler.preemption == "swap" and not self.swap_space:
            raise ConfigError("preemption swap needs host memory: set swap_space, or preemption recompute")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {self.num_threads}")
