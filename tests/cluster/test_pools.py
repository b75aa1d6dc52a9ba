from __future__ import annotations

import pytest

from cluster.pools import check_pools
from cluster.spec import ClusterSpec, PoolSpec, PoolsSpec
from engine.config import ModelConfig
from engine.errors import ConfigError

MIB = 1024 * 1024
GIB = 1024 * MIB
BLOCK_BYTES = 16 * 4096
MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    max_model_len=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=True,
    eos_token_ids=(),
    bos_token_id=None,
)


def spec(prefill: PoolSpec, decode: PoolSpec) -> ClusterSpec:
    return ClusterSpec(pools=PoolsSpec(prefill=prefill, decode=decode))


def test_pools_that_fill_the_machine_are_allowed() -> None:
    pools = spec(PoolSpec(replicas=2, kv_memory_bytes=GIB), PoolSpec(replicas=1, kv_memory_bytes=2 * GIB))
    check_pools(pools, MODEL, 4 * GIB)
    with pytest.raises(ConfigError):
        check_pools(pools, MODEL, 4 * GIB - 1)


def test_pools_that_are_more_than_the_machine_say_what_to_set() -> None:
    pools = spec(PoolSpec(replicas=1, kv_memory_bytes=GIB), PoolSpec(replicas=3, kv_memory_bytes=2 * GIB))
    with pytest.raises(ConfigError) as caught:
        check_pools(pools, MODEL, 4 * GIB)
    assert str(caught.value) == (
        "pools.prefill and pools.decode: the KV pools of 4 workers take 7 GiB, this machine has 4 GiB; set "
        "kv_memory_bytes (or num_blocks_override) so that a worker takes less than 1 GiB, or have fewer workers"
    )


def test_blocks_that_were_asked_for_count_with_their_bytes() -> None:
    pools = spec(PoolSpec(replicas=0), PoolSpec(num_blocks_override=100))
    check_pools(pools, MODEL, 100 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"^pools\.decode: the KV pools of 1 workers"):
        check_pools(pools, MODEL, 100 * BLOCK_BYTES - 1)


def test_host_memory_counts_too() -> None:
    pools = spec(PoolSpec(kv_memory_bytes=GIB, swap_space=GIB), PoolSpec(kv_memory_bytes=GIB))
    check_pools(pools, MODEL, 3 * GIB)
    with pytest.raises(ConfigError, match="swap_space"):
        check_pools(pools, MODEL, 3 * GIB - 1)
