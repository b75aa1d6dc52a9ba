"""Settings of one engine: frozen, keyword-only, checked once, no value that means 'not yet known'."""

from __future__ import annotations

import re
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
class LinearRopeScaling:
    """Every position divided by `factor` (Hugging Face `rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLayers:
    """Layers whose attention looks back on a window only."""

    window: int
    """Tokens that a query sees, itself included."""
    layers: tuple[int, ...]
    """Ascending."""
    rope_theta: float | None = None
    """Base of their rotary embedding, which is then not scaled. None: they turn as the other layers do."""


ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only transformer: sizes, and how its family differs from Llama, which the defaults describe."""

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
    rope_scaling: RopeScaling | LinearRopeScaling | None
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    qk_norm: bool = False
    """Each head of queries and keys is normed before it is rotated."""
    post_norms: bool = False
    """What attention and MLP give is normed before it is added to the residual stream."""
    norm_offset: float = 0.0
    """Added to the weights of every norm: 1 where a checkpoint holds what they differ from 1."""
    activation: str = "silu"
    attention_scale: float | None = None
    """Factor of the products of queries and keys; None: head_dim ** -0.5."""
    scale_embedding: bool = False
    """Embeddings are multiplied by hidden_size ** 0.5."""
    final_soft_cap: float | None = None
    """A logit x becomes cap * tanh(x / cap)."""
    local: LocalLayers | None = None
    """None: every layer sees the whole context."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")
        if self.local is not None and self.local.window < 1:
            raise ConfigError(f"sliding_window must be at least 1, got {self.local.window}")

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def shared_window(self) -> int | None:
        return shared_window(self.local, self.num_layers)


def shared_window(local: LocalLayers | None, num_layers: int) -> int | None:
    """Tokens that a token looks back on in any layer, itself included; None: on all of them."""
    return local.window if local is not None and len(local.layers) == num_layers else None


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

    def blocks_outside_window(self, num_tokens: int) -> int:
        """Leading blocks that no token from position `num_tokens` on looks back on."""
        if self.sliding_window is None:
            return 0
        return max(0, num_tokens + 1 - self.sliding_window) // self.block_size


PREEMPTIONS = ("recompute", "swap")
KERNELS = ("auto", "native", "reference")
WEIGHTS_DTYPES = ("auto", "int8")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


def check_device(device: str, gpu_memory_utilization: float | None) -> None:
    """Raises `ConfigError` naming the setting."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device[:40]!r}")
    if device == "cpu" and gpu_memory_utilization is not None:
        raise ConfigError(
            f"gpu_memory_utilization {gpu_memory_utilization} is of a GPU, and device is cpu: kv_memory_bytes sets the "
            "pool there"
        )


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
    weights_dtype: str = "auto"
    """"int8": the weights of all products as whole numbers with a scale for each output, and what they are multiplied
    with rounded to whole numbers for each token. Half the memory and the time to read it. "auto": as `dtype` says."""
    scheduler: SchedulerConfig = SchedulerConfig()
    device: str = "auto"
    """Where the model runs: "cpu"; "cuda", the first GPU that the process sees; "cuda:N"; or "auto", which is a GPU if
    `gpu_memory_utilization` says how much of one and it can run the model, else the CPU."""
    num_threads: int = 1
    """Of the kernels. One a worker: prefill and decode share a small machine without fighting."""
    native_cache: str | None = None
    """Folder for the libraries that `engine.native` compiles at the first start. None: run without them."""
    kernels: str = "auto"
    """Who computes: "native" code, compiled for this CPU; the plain PyTorch "reference"; or "auto", which is native
    where that can run the model, and says why where it cannot."""

    borrows: bool = False
    """Whether blocks of peers on this host may be read where they are, by a decode worker."""
    lent_share: float = 0.0
    """Of the pool, what peers on this host may read where it is: see `WorkerConfig.max_lent_share`."""

    def __post_init__(self) -> None:
        Knobs.__post_init__(self)
        self.check_works()
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {sorted(DTYPE_BYTES)}, got {self.dtype!r}")
        if self.weights_dtype not in WEIGHTS_DTYPES:
            raise ConfigError(f"weights_dtype must be one of {', '.join(WEIGHTS_DTYPES)}, got {self.weights_dtype!r}")
        if self.scheduler.preemption == "swap" and not self.swap_space:
            raise ConfigError("preemption swap needs host memory: set swap_space, or preemption recompute")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        check_device(self.device, self.gpu_memory_utilization)
        if self.device.startswith("cuda") and self.kernels != "auto":
            raise ConfigError(
                f"kernels {self.kernels} are for CPUs, and device is {self.device}: leave kernels at auto"
            )
        if self.borrows and self.tensor_parallel_size > 1:
            raise ConfigError(f"tensor_parallel_size {self.tensor_parallel_size}: ranks see no pool but their own")
        if self.weights_dtype != "auto" and self.tensor_parallel_size > 1:
            raise ConfigError(
                f"weights_dtype {self.weights_dtype}: its scales are of whole rows, and tensor_parallel_size "
                f"{self.tensor_parallel_size} cuts them"
            )
        if not 0.0 <= self.lent_share <= 1.0:
            raise ConfigError(f"lent_share must be in [0, 1], got {self.lent_share}")
        if self.num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {self.num_threads}")
