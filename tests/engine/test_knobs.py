from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig
from engine.errors import ConfigError
from engine.knobs import KNOBS, Knobs
from engine.knobs_doc import PATH, render


def test_there_are_ten_knobs_and_a_sibling() -> None:
    assert sorted(KNOBS) == [
        "block_size",
        "enable_prefix_caching",
        "eviction_policy",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "kv_memory_bytes",
        "max_model_len",
        "num_blocks_override",
        "sliding_window",
        "swap_space",
        "tensor_parallel_size",
    ]


def test_every_knob_is_a_setting_of_the_engine_and_says_what_it_costs() -> None:
    assert KNOBS.keys() <= {each.name for each in fields(EngineConfig)}
    for knob in KNOBS.values():
        assert knob.meaning.endswith(".")
        assert knob.too_high.endswith(".")
        assert knob.too_low.endswith(".")


@pytest.mark.parametrize("name", KNOBS)
def test_the_default_of_a_knob_is_in_its_range_and_works(name: str) -> None:
    KNOBS[name].check(KNOBS[name].default)
    KNOBS[name].check_works(KNOBS[name].default)
    assert EngineConfig(model_path="m").knobs()[name] == KNOBS[name].default


@pytest.mark.parametrize("name", [knob.name for knob in KNOBS.values() if knob.works is not None])
def test_what_works_is_in_the_range_and_the_rest_is_told_what_to_do_instead(name: str) -> None:
    knob = KNOBS[name]
    for value in knob.works or ():
        knob.check(value)
    assert knob.instead


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("block_size", 0, "block_size must be a power of two in [1, 1024], got 0"),
        ("block_size", -16, "block_size must be a power of two in [1, 1024], got -16"),
        ("block_size", 48, "block_size must be a power of two in [1, 1024], got 48"),
        ("block_size", 2048, "block_size must be a power of two in [1, 1024], got 2048"),
        ("block_size", True, "block_size must be a power of two in [1, 1024], got True"),
        ("block_size", 16.0, "block_size must be a power of two in [1, 1024], got 16.0"),
        ("block_size", None, "block_size must be a power of two in [1, 1024], got None"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be true or false, got 1"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization must be in (0, 1], got 0.0"),
        ("gpu_memory_utilization", 1.01, "gpu_memory_utilization must be in (0, 1], got 1.01"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization must be in (0, 1], got nan"),
        ("kv_memory_bytes", 0, "kv_memory_bytes must be at least 1, got 0"),
        ("kv_memory_bytes", "1GB", "kv_memory_bytes must be at least 1, got '1GB'"),
        ("kv_cache_dtype", "int3", "kv_cache_dtype must be one of auto, float32, bfloat16, "),
        ("swap_space", -1, "swap_space must be at least 0, got -1"),
        ("max_model_len", 0, "max_model_len must be at least 1, got 0"),
        ("eviction_policy", "LRU", "eviction_policy must be one of lru, got 'LRU'"),
        ("sliding_window", 0, "sliding_window must be at least 1, got 0"),
        ("tensor_parallel_size", 0, "tensor_parallel_size must be in [1, 64], got 0"),
        ("tensor_parallel_size", 65, "tensor_parallel_size must be in [1, 64], got 65"),
        ("num_blocks_override", 0, "num_blocks_override must be at least 1, got 0"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(name: str, value: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Knobs(**{name: value})
    assert str(caught.value).startswith(complaint)
    with pytest.raises(ConfigError):
        EngineConfig(model_path="m", **{name: value})


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 4096)])
def test_what_nothing_implements_yet_is_refused_at_start_and_not_ignored(name: str, value: Any) -> None:
    asked = Knobs(**{name: value})  # in range: `kvrelay plan` takes it
    with pytest.raises(ConfigError, match=f"^{name} {value} is not supported yet: ") as caught:
        EngineConfig(model_path="m", **asked.knobs())
    assert KNOBS[name].instead in str(caught.value)


def test_the_pool_checks_its_block_size_by_the_same_table() -> None:
    with pytest.raises(ConfigError, match=r"block_size must be a power of two in \[1, 1024\], got 3"):
        CacheConfig(num_blocks=1, block_size=3)


def test_the_document_is_the_table() -> None:
    assert PATH.read_text(encoding="utf-8") == render(), "run: python -m engine.knobs_doc"
