"""What the workers of a pool take of a machine, and whether they fit on one together. Knows no Ray and no process."""

from __future__ import annotations

from cluster.spec import ROLES, ClusterSpec, PoolSpec
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kv_layout import KvLayout
from engine.plan import pool_of
from engine.sizes import format_binary_size


def threads_of(pool: PoolSpec) -> int:
    """Of the kernels, in all ranks of one worker."""
    return pool.num_threads * pool.tensor_parallel_size


def check_pools(spec: ClusterSpec, model: ModelConfig, machine_bytes: int) -> None:
    """Raises `ConfigError` that says what to set if the pools of all workers are more than `machine_bytes`.

    Memory is taken when it is first written, so they would all start, and be killed under load.
    """
    counts = {role: spec.pool(role).replicas for role in ROLES}
    total = sum(counts[role] * _pool_bytes(spec, role, model) for role in ROLES)
    if total <= machine_bytes:
        return
    workers = sum(counts.values())
    held = "KV pools, with swap_space," if any(spec.pool(role).swap_space for role in ROLES) else "KV pools"
    where = " and ".join(f"pools.{role}" for role in ROLES if counts[role])
    raise ConfigError(
        f"{where}: the {held} of {workers} workers take {format_binary_size(total)}, this machine has "
        f"{format_binary_size(machine_bytes)}; set kv_memory_bytes (or num_blocks_override) so that a worker takes "
        f"less than {format_binary_size(machine_bytes // workers)}, or have fewer workers"
    )


def _pool_bytes(spec: ClusterSpec, role: str, model: ModelConfig) -> int:
    pool = spec.pool(role)
    if pool.device.startswith("cuda"):
        return pool.swap_space  # the pool itself is on a card
    layout = KvLayout(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=pool.block_size,
        dtype=pool.kv_dtype(spec.dtype),
    )
    held = pool_of(layout, pool.kv_memory_bytes, pool.num_blocks_override).num_bytes
    return held + pool.swap_space // layout.block_bytes * layout.block_bytes
