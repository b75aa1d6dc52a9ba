from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.knobs import KNOBS, Knobs
from engine.kv_layout import KV_DTYPE_BYTES, KvLayout
from engine.model_shapes import SHAPES, ModelShape
from engine.plan import Fit, Plan, Question, check_pool, fit, make_plan, pool_of

GB = 10**9
TINY = ModelShape(name="tiny", num_layers=1, num_kv_heads=4, head_dim=8, max_model_len=1000)


def question(
    shape: ModelShape | str = "llama-3-70b",
    *,
    memory: int = 120 * GB,
    context: int = 4000,
    dtype: str = "float16",
    shared_prefix: int = 0,
    weights: int = 0,
    **knobs: Any,
) -> Question:
    return Question(
        shape=SHAPES[shape] if isinstance(shape, str) else shape,
        knobs=Knobs(kv_memory_bytes=memory, **knobs),
        dtype=dtype,
        context_len=context,
        shared_prefix_len=shared_prefix,
        weights_bytes=weights,
    )


def alternative(made: Plan, label: str) -> Fit:
    return next(each for each in made.alternatives if each.label == label)


def test_llama_70b_in_120_gb_holds_366_thousand_tokens_and_90_requests_of_4000() -> None:
    chosen = make_plan(question("llama-3-70b")).chosen
    assert chosen.token_bytes == 327_680
    assert chosen.block_bytes == 5_242_880  # 5.24 MB
    assert chosen.num_blocks == 22_888
    assert chosen.num_tokens == 366_208
    assert chosen.blocks_per_request == 250
    assert chosen.num_requests == 91


def test_a_token_of_llama_13b_takes_819_200_bytes() -> None:
    assert make_plan(question("llama-13b", context=2000)).chosen.token_bytes == 819_200


@pytest.mark.parametrize("dtype", KV_DTYPE_BYTES)
def test_a_plan_takes_the_bytes_of_a_block_from_its_layout_scales_included(dtype: str) -> None:
    layout = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=dtype)
    chosen = fit(question("llama-3-8b", kv_cache_dtype=dtype))
    assert (chosen.block_bytes, chosen.token_bytes) == (layout.block_bytes, layout.token_bytes)


def test_the_table_of_knobs_has_every_type_of_kv() -> None:
    assert set(KNOBS["kv_cache_dtype"].choices) == {"auto", *KV_DTYPE_BYTES}


def test_a_narrow_type_nearly_doubles_what_fits() -> None:
    made = make_plan(question())
    for dtype in ("fp8_e4m3", "int8"):
        assert 1.95 < alternative(made, f"kv_cache_dtype {dtype}").num_tokens / made.chosen.num_tokens < 2


def test_a_narrow_type_has_no_wider_alternatives() -> None:
    labels = [each.label for each in make_plan(question(kv_cache_dtype="int8")).alternatives]
    assert not [label for label in labels if label.startswith("kv_cache_dtype")]


def test_a_window_bounds_the_blocks_of_a_request_wherever_it_begins_in_a_block() -> None:
    assert fit(question(sliding_window=1024)).blocks_per_request == 65
    assert fit(question(sliding_window=1)).blocks_per_request == 1
    assert fit(question(sliding_window=2)).blocks_per_request == 2
    assert fit(question(sliding_window=9999)).blocks_per_request == 250


@given(context=st.integers(1, 300), window=st.integers(1, 300), size=st.sampled_from([1, 2, 8, 16]))
def test_no_window_ever_touches_more_blocks_than_planned(context: int, window: int, size: int) -> None:
    """Against the obvious model: the blocks that hold the last `window` tokens, at every length on the way."""
    touched = max((end - 1) // size - max(0, end - window) // size + 1 for end in range(1, context + 1))
    planned = fit(question(TINY, context=context, sliding_window=window, block_size=size)).blocks_per_request
    assert touched <= planned <= touched + (context < window + size)


def test_the_models_own_window_is_among_the_alternatives() -> None:
    made = make_plan(question("mistral-7b", context=16_000))
    assert alternative(made, "sliding_window 4096").blocks_per_request == 257


def test_devices_share_the_heads_so_each_holds_more_tokens() -> None:
    made = make_plan(question())
    for devices in (2, 4, 8):
        assert alternative(made, f"tensor_parallel_size {devices}").token_bytes == 327_680 // devices


def test_only_a_whole_number_of_heads_for_each_device_is_planned() -> None:
    made = make_plan(question("smollm2-135m", memory=GB))
    assert not [each for each in made.alternatives if each.label.startswith("tensor_parallel_size")]
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 does not divide the 3 KV heads of smollm2-135m"):
        question("smollm2-135m", memory=GB, tensor_parallel_size=2)


def test_weights_and_the_share_of_the_device_come_off_the_memory_for_kv() -> None:
    asked = question(memory=80 * GB, weights=140 * GB, gpu_memory_utilization=0.9, tensor_parallel_size=4)
    assert asked.kv_memory_bytes == 37 * GB
    assert alternative(make_plan(asked), "tensor_parallel_size 1").num_requests == 0


def test_a_prefix_that_all_share_is_held_once_in_whole_blocks() -> None:
    shared = fit(question(shared_prefix=1000))
    assert shared.shared_blocks == 62
    assert shared.num_requests == (22_888 - 62) // (250 - 62)
    assert fit(question(shared_prefix=1000, enable_prefix_caching=False)).num_requests == 91


def test_a_request_that_is_all_prefix_still_has_a_block_of_its_own() -> None:
    chosen = fit(question(shared_prefix=4000))
    assert (chosen.blocks_per_request, chosen.shared_blocks) == (250, 249)


def test_half_of_the_last_block_is_expected_to_stay_empty() -> None:
    waste = {each.block_size: each for each in make_plan(question(block_size=4)).waste}
    assert list(waste) == [4, 8, 16, 32, 64, 128, 256]
    assert waste[16].tokens == 7.5
    assert waste[16].percent == pytest.approx(100 * 7.5 / 4007.5)


@given(size=st.sampled_from([1, 2, 8, 16, 64]))
def test_the_expected_waste_is_the_mean_over_every_length(size: int) -> None:
    lengths = range(1, 20 * size + 1)
    mean = sum(-length % size for length in lengths) / len(lengths)
    asked = question(TINY, context=100, block_size=size)
    assert next(each.tokens for each in make_plan(asked).waste if each.block_size == size) == mean


def test_blocks_are_compared_with_reservations_of_the_whole_length() -> None:
    assert make_plan(question()).contiguous_requests == 366_208 // 8192
    assert make_plan(question(max_model_len=4000)).contiguous_requests == 91


def test_swap_space_holds_the_blocks_of_all_devices() -> None:
    assert make_plan(question(swap_space=64 * GB)).swap_blocks == 64 * GB // 5_242_880
    assert make_plan(question(swap_space=64 * GB, tensor_parallel_size=2)).swap_blocks == 64 * GB // 5_242_880


def test_the_override_sets_the_blocks_and_block_sizes_are_compared_in_the_same_memory() -> None:
    made = make_plan(question(memory=1, num_blocks_override=500))
    assert (made.chosen.num_blocks, made.chosen.num_requests) == (500, 2)
    assert {each.block_size: each.num_requests for each in made.waste}[8] == 2


def test_a_plan_says_what_workers_refuse_today() -> None:
    made = make_plan(question())
    assert made.chosen.refused == ""
    assert "sliding_window 1024 is not supported yet" in alternative(made, "sliding_window 1024").refused


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"context": 0}, r"context must be in \[1, 8192\], the max_model_len, got 0"),
        ({"context": 9000}, r"context must be in \[1, 8192\], the max_model_len, got 9000"),
        ({"context": 5000, "max_model_len": 4096}, r"context must be in \[1, 4096\], the max_model_len, got 5000"),
        ({"max_model_len": 9000}, "max_model_len 9000 is more than the 8192 of llama-3-70b"),
        ({"shared_prefix": 4001}, r"shared_prefix must be in \[0, 4000\], got 4001"),
        ({"weights": -1}, "weights must be at least 0, got -1"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 does not divide the 8 KV heads of llama-3-70b"),
    ],
)
def test_a_question_without_an_answer_names_field_and_limit(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        question(**settings)


@pytest.mark.parametrize("settings", [{"memory": 1000}, {"weights": 120 * GB}, {"weights": 200 * GB}])
def test_memory_for_less_than_one_block_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"memory: \d+ bytes .* less than one block of 5242880 bytes"):
        make_plan(question(**settings))


LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4, dtype="bfloat16")  # 768 bytes a block


def test_a_pool_is_told_in_one_line() -> None:
    pool = pool_of(LAYOUT, 1024 * 768 + 767)
    assert (pool.num_blocks, pool.num_bytes) == (1024, 1024 * 768)
    assert str(pool) == "1,024 blocks of 4 = 4,096 tokens, 768 KiB of bfloat16"
    assert pool_of(LAYOUT, 1, num_blocks_override=7).num_blocks == 7


def test_a_pool_without_a_block_names_the_knob() -> None:
    with pytest.raises(ConfigError, match="kv_memory_bytes 767 is less than one block of 768 bytes"):
        check_pool(pool_of(LAYOUT, 767), Knobs(kv_memory_bytes=767), machine_bytes=2**40)


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        (Knobs(kv_memory_bytes=2**31), f"kv_memory_bytes {2**31}: .*set kv_memory_bytes below {2**30}"),
        (Knobs(num_blocks_override=9**9), f"num_blocks_override {9**9}: .*set num_blocks_override below 1398101"),
    ],
)
def test_a_pool_larger_than_the_machine_says_which_knob_to_set_and_to_what(knobs: Knobs, named: str) -> None:
    pool = pool_of(LAYOUT, knobs.kv_memory_bytes, knobs.num_blocks_override)
    with pytest.raises(ConfigError, match=f"^{named}, and leave room for the model"):
        check_pool(pool, knobs, machine_bytes=2**30)
    check_pool(pool, knobs, machine_bytes=pool.num_bytes)
