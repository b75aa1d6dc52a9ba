"""What a GPU worker decides from numbers: sizes of pool and buffers, which captured graph a step takes. No tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kernels.attention_plan import num_splits_for

CONTEXT_BYTES = 512 << 20
"""What CUDA takes in each process, at most. What a card has in use beyond that belongs to other processes."""
DEFAULT_UTILIZATION = 0.9
"""Of a card that a worker has to itself."""
MAX_HEAD_DIM = 256
FLOAT32_MAX_HEAD_DIM = 64
OLDEST_ARCH = 80
_ALIGNMENT = 16
_SMALL_BATCHES = (1, 2, 4)
_BATCH_STEP = 8


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one card, as measured."""

    total: int
    used: int
    """Before our weights were loaded: by other processes, and by CUDA itself in this one."""
    peak: int
    """Most that this process had allocated for weights and for the largest step."""


def pool_bytes(memory: GpuMemory, gpu_memory_utilization: float, graph_bytes: int, block_bytes: int) -> int:
    """For KV: what `gpu_memory_utilization` of the card leaves beside all that this worker takes otherwise. Workers
    that share a card have a share each, whichever starts first.

    Raises `ConfigError` naming the setting if that is less than one block, or more than others have left.
    """
    if not 0.0 < gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}")
    taken = min(memory.used, CONTEXT_BYTES) + memory.peak + graph_bytes
    left = int(memory.total * gpu_memory_utilization) - taken
    if left < block_bytes:
        raise ConfigError(
            f"gpu_memory_utilization {gpu_memory_utilization} of {memory.total} bytes leaves {max(0, left)} for KV "
            f"beside {taken} for weights, a step, graphs and CUDA itself: a block needs {block_bytes}"
        )
    if left > memory.total - memory.used - memory.peak - graph_bytes:
        most = 1 - (memory.used - min(memory.used, CONTEXT_BYTES)) / memory.total
        raise ConfigError(
            f"gpu_memory_utilization {gpu_memory_utilization} is more than other processes leave of the card's "
            f"{memory.total} bytes, of which {memory.used} were in use: set at most {most:.2f}"
        )
    return left


def obstacle(config: ModelConfig, dtype: str, arch: int) -> str | None:
    """Why the decoder for GPUs cannot run this model on a card of compute capability `arch` / 10, or None.

    Every family that the decoder for CPUs runs is one here too: they differ by `ModelConfig` alone.
    """
    if arch < OLDEST_ARCH:
        return f"the card is sm_{arch}, the kernels need sm_{OLDEST_ARCH} or later"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is more than {MAX_HEAD_DIM}"
    if dtype == "float32" and config.head_dim > FLOAT32_MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} in float32 does not fit into shared memory: dtype bfloat16 or float16"
    return None


def decode_step_bytes(config: ModelConfig, num_seqs: int, dtype_bytes: int) -> int:
    """What the captured decode steps hold for their results: all share the memory of the largest.

    Twice what its tensors take at once: torch's allocator hands out whole segments.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    short = config.hidden_size * 2 + heads * config.head_dim + 3 * config.intermediate_size + config.vocab_size
    full = config.hidden_size + config.vocab_size
    return 2 * num_seqs * (short * dtype_bytes + full * 4)


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes that decode graphs are captured for: close together where a row more costs most."""
    sizes = [*_SMALL_BATCHES, *range(_BATCH_STEP, max_num_seqs + 1, _BATCH_STEP), max_num_seqs]
    return tuple(sorted({size for size in sizes if size <= max_num_seqs}))


@dataclass(frozen=True, slots=True)
class GraphKey:
    """A captured decode step serves every batch of up to `bucket` sequences that need up to `splits` splits."""

    bucket: int
    splits: int


def graph_key(num_seqs: int, longest: int, buckets: Sequence[int], split_keys: int) -> GraphKey | None:
    """The smallest graph for a decode step; None if the batch is larger than any, so it runs without one.

    Splits are rounded up to a power of two: few graphs, and a split that is empty costs a launch of nothing.
    """
    bucket = next((size for size in buckets if size >= num_seqs), None)
    if bucket is None:
        return None
    return GraphKey(bucket, 1 << (num_splits_for(longest, None, split_keys) - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    offset: int
    """Bytes from the start of the buffer, aligned."""
    width: int
    """Bytes of a value: 8 or 4, both signed integers."""
    columns: int
    """Values of each row."""

    def end(self, num_rows: int) -> int:
        return self.offset + num_rows * self.columns * self.width


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Everything that a decode step reads of its batch, in one buffer: one copy to the GPU for a step.

    Fields have a row for each sequence. Block tables stand last, as they are nearly all of it: a step copies up to the
    end of the rows that it has.
    """

    max_num_seqs: int
    max_blocks: int
    """Of a sequence."""

    def fields(self) -> dict[str, Field]:
        fields, offset = {}, 0
        for name, width, columns in (
            ("token_ids", 8, 1),
            ("positions", 8, 1),
            ("slot_blocks", 8, 1),
            ("slot_offsets", 8, 1),
            ("context_lens", 4, 1),
            ("rows", 4, 1),
            ("block_tables", 4, self.max_blocks),
        ):
            fields[name] = Field(name, offset, width, columns)
            offset = -(-fields[name].end(self.max_num_seqs) // _ALIGNMENT) * _ALIGNMENT
        return fields

    @property
    def nbytes(self) -> int:
        return self.fields()["block_tables"].end(self.max_num_seqs)

    def used_bytes(self, num_rows: int) -> int:
        return self.fields()["block_tables"].end(num_rows)
