from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import MAX_MODEL_LEN, FakeModel
from worker_process import make_tiny_model

from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ConfigError, EngineError, ModelError
from engine.kv_cache import KvCache
from worker.engine_builder import assemble_engine, build_engine, warm_up

FINGERPRINT = bytes(32)


def config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"model_path": "none", "dtype": "float32", "block_size": 4}
    return EngineConfig(**defaults | settings)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KvCache]]:
    """Every pool that was made."""
    made: list[KvCache] = []
    original = KvCache.__init__

    def noting(self: KvCache, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        made.append(self)

    monkeypatch.setattr(KvCache, "__init__", noting)
    yield made
    for pool in made:
        pool.close()


def test_the_pool_is_as_large_as_the_memory_that_it_may_take(pools: list[KvCache]) -> None:
    block_bytes = 2 * 2 * 4 * 4 * 4  # layers, K and V, head_dim, block_size, float32
    parts = assemble_engine(FakeModel(), FINGERPRINT, config(kv_memory_bytes=10 * block_bytes + 1))

    assert parts.kv.num_blocks == 10
    assert (parts.pool.num_blocks, parts.pool.num_tokens, parts.pool.num_bytes) == (10, 40, parts.kv.nbytes)
    assert parts.identity.model_fingerprint == FINGERPRINT
    assert parts.max_model_len == MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("kv_cache_dtype", "kv_dtype"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")]
)
def test_the_type_of_kv_is_that_of_the_pool_and_of_what_its_blocks_are_called(
    pools: list[KvCache], kv_cache_dtype: str, kv_dtype: str
) -> None:
    parts = assemble_engine(FakeModel(), FINGERPRINT, config(kv_cache_dtype=kv_cache_dtype, num_blocks_override=4))

    assert (parts.kv.layout.dtype, parts.pool.dtype) == (kv_dtype, kv_dtype)
    assert parts.identity.kv_dtype == (kv_dtype if kv_dtype == "float32" else f"{kv_dtype} of float32")
    assert parts.pool.num_bytes == parts.kv.nbytes == 4 * parts.kv.layout.block_bytes


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_size": 3}, "block_size must be a power of two"),
        ({"max_model_len": MAX_MODEL_LEN + 1}, f"max_model_len {MAX_MODEL_LEN + 1} is more than"),
        ({"kv_memory_bytes": 10}, "kv_memory_bytes 10 is less than one block"),
        ({"kv_memory_bytes": 1 << 50}, f"kv_memory_bytes {1 << 50}: .* is larger than this machine's memory"),
        ({"num_blocks_override": 1 << 45}, f"num_blocks_override {1 << 45}: .* is larger than this machine's memory"),
    ],
)
def test_settings_that_do_not_fit_are_named_and_leave_no_pool(
    pools: list[KvCache], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        assemble_engine(FakeModel(), FINGERPRINT, config(**settings))

    assert all(pool.closed for pool in pools)


def test_an_engine_that_refuses_its_model_leaves_no_pool(pools: list[KvCache], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise EngineError("no")

    monkeypatch.setattr("worker.engine_parts.Engine", refuse)
    with pytest.raises(EngineError, match="no"):
        assemble_engine(FakeModel(), FINGERPRINT, config(num_blocks_override=4))

    assert [pool.closed for pool in pools] == [True]


def test_a_model_folder_becomes_an_engine_with_the_time_of_each_part(tmp_path: Path, pools: list[KvCache]) -> None:
    folder = make_tiny_model(tmp_path)
    parts = build_engine(config(model_path=str(folder), num_blocks_override=4, num_threads=torch.get_num_threads()))

    assert parts.timings.keys() == {"native_s", "model_s", "fingerprint_s", "kv_and_engine_s", "warm_up_s"}
    assert parts.kv.num_blocks == 4


@pytest.mark.parametrize("num_blocks", [1, 2, 40])
def test_warming_up_stays_within_the_pool(num_blocks: int) -> None:
    parts = assemble_engine(FakeModel(), FINGERPRINT, config(num_blocks_override=num_blocks, block_size=1))

    warm_up(FakeModel(), parts.kv)

    parts.engine.check_integrity()
    assert parts.engine.stats().blocks.free == num_blocks
    parts.kv.close()


def test_a_folder_that_holds_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        build_engine(config(model_path=str(tmp_path)))


def test_swap_space_becomes_whole_blocks_of_host_memory(pools: list[KvCache]) -> None:
    parts = assemble_engine(FakeModel(), FINGERPRINT, config(num_blocks_override=4, swap_space=256 * 5 + 255))

    assert parts.kv.layout.block_bytes == 256
    assert parts.engine.stats().host.total == 5
    parts.kv.close()
    assert all(pool.closed for pool in pools)
    assert len(pools) == 2


def test_swap_space_that_the_machine_does_not_have_is_refused(pools: list[KvCache]) -> None:
    with pytest.raises(ConfigError, match=r"swap_space 1125899906842624 beside .* is more than this machine's"):
        assemble_engine(FakeModel(), FINGERPRINT, config(num_blocks_override=4, swap_space=1 << 50))
    assert pools == []


def test_preemption_by_swap_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="set swap_space, or preemption recompute"):
        config(scheduler=SchedulerConfig(preemption="swap"))


def test_native_kernels_compute_where_they_can(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    parts = build_engine(
        EngineConfig(model_path=str(tmp_path / "model"), kv_memory_bytes=1 << 20, native_cache=str(tmp_path / "native"))
    )
    parts.kv.close()

    assert parts.kernels.startswith("native ")


def test_blocks_of_int8_weights_are_never_those_of_bfloat16(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    roots = set()
    for weights_dtype in ("auto", "int8"):
        parts = build_engine(EngineConfig(model_path=str(folder), kv_memory_bytes=1 << 20, weights_dtype=weights_dtype))
        parts.kv.close()
        roots.add(parts.identity.root(b""))

    assert len(roots) == 2


def test_where_they_cannot_the_reference_computes_and_it_is_said_why(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    parts = build_engine(
        config(model_path=str(tmp_path / "model"), kv_memory_bytes=1 << 20, native_cache=str(tmp_path / "native"))
    )
    parts.kv.close()

    assert parts.kernels == "reference: dtype is float32, not bfloat16"


def test_without_a_compiler_the_reference_computes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")
    monkeypatch.setenv("PATH", str(tmp_path))
    parts = build_engine(
        EngineConfig(model_path=str(tmp_path / "model"), kv_memory_bytes=1 << 20, native_cache=str(tmp_path / "native"))
    )
    parts.kv.close()

    assert parts.kernels == "reference: no compiler: none of c++, g++, clang++ is on the path"
    assert "no native kernels, so the reference in PyTorch computes, slowly" in caplog.text


def test_native_kernels_that_are_demanded_and_impossible_are_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    make_tiny_model(tmp_path / "model")

    with pytest.raises(ConfigError, match="kernels: native is not possible: no native_cache is set"):
        build_engine(EngineConfig(model_path=str(tmp_path / "model"), kv_memory_bytes=1 << 20, kernels="native"))


def test_swap_space_that_holds_no_block_is_refused_where_preemption_needs_it() -> None:
    with pytest.raises(ConfigError, match=r"preemption swap needs host memory: swap_space 1 holds no block"):
        assemble_engine(
            FakeModel(),
            FINGERPRINT,
            config(kv_memory_bytes=1 << 20, swap_space=1, scheduler=SchedulerConfig(preemption="swap")),
        )


def test_equal_kv_types_of_other_activations_are_other_blocks() -> None:
    roots = set()
    for dtype in ("float32", "bfloat16"):
        parts = assemble_engine(
            FakeModel(), FINGERPRINT, config(dtype=dtype, kv_cache_dtype="float16", kv_memory_bytes=1 << 20)
        )
        parts.kv.close()
        roots.add(parts.identity.root(b""))

    assert len(roots) == 2
