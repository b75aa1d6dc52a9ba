"""Triton's attention in its interpreter, against the reference: every kind of sequence, type, window and cap.

The results begin as NaN, every slot that is no context is NaN, and block ids that no query sees lie outside the pool:
an interpreter that read one would crash.
"""

from __future__ import annotations

import pytest
import torch
from paged_cases import LAYER, PagedCase, paged_case

from engine.kernels import attention_plan as plan
from engine.kernels import triton_codes as codes
from engine.kernels import triton_paged
from engine.kernels.scoring import Scoring

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
TYPES = tuple(TOLERANCES)


def check(case: PagedCase) -> None:
    """Equal to the reference but for rounding, in every row."""
    q = case.q
    result = triton_paged.paged_attention(
        q, case.kv.pool, LAYER, case.poisoned_tables, case.query_starts, case.context_lens, case.scoring, case.kv.scales
    )
    expected = case.expected()
    assert result.dtype == q.dtype
    assert result.isfinite().all()
    torch.testing.assert_close(result.float(), expected, rtol=TOLERANCES[q.dtype], atol=TOLERANCES[q.dtype])


@pytest.mark.parametrize("dtype", TYPES)
def test_decoding_and_prompts_of_one_batch(dtype: torch.dtype) -> None:
    check(paged_case([1, 33, 16, 40], [1, 1, 16, 9], dtype=dtype))


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_quantized_kv(kv_dtype: str) -> None:
    check(paged_case([5, 40], [1, 7], dtype=torch.float16, kv_dtype=kv_dtype))


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3", "int8"])
def test_tiles_and_conversions_of_older_gpus(kv_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "arch_of", lambda device: 80)
    check(paged_case([5, 40], [1, 7], head_dim=64, dtype=torch.float16, kv_dtype=kv_dtype))


@pytest.mark.parametrize(("arch", "kind"), [(80, codes.FP8_BITS), (89, codes.FP8_NATIVE), (90, codes.FP8_NATIVE)])
def test_fp8_is_converted_by_the_hardware_where_it_can(arch: int, kind: int) -> None:
    assert triton_paged.kind_of(torch.float8_e4m3fn, arch) == kind


def test_a_long_context_is_split_and_put_together() -> None:
    check(paged_case([1100, 3, 513], [1, 1, 1], heads=(2, 1)))


@pytest.mark.parametrize("window", [1, 5, 20, 64, 1000])
def test_windows(window: int) -> None:
    check(paged_case([70, 9, 40], [1, 1, 30], heads=(2, 1), scoring=Scoring(0.3, window=window)))


def test_a_window_within_a_long_context_begins_in_the_middle_of_a_split() -> None:
    check(paged_case([1500], [1], heads=(2, 1), scoring=Scoring(0.3, window=600)))


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_soft_caps(cap: float) -> None:
    check(paged_case([40, 33], [1, 12], heads=(4, 2), scoring=Scoring(2.0, soft_cap=cap)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3", "int8"])
@pytest.mark.parametrize("scoring", [Scoring(0.2), Scoring(0.2, window=19, soft_cap=2.0)])
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((5, 5), 24), ((20, 1), 16)])
def test_every_type_with_every_scoring_and_shape(
    dtype: torch.dtype, kv_dtype: str | None, scoring: Scoring, heads: tuple[int, int], head_dim: int
) -> None:
    check(
        paged_case(
            [1, 45, 31], [1, 1, 17], heads=heads, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, scoring=scoring
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 8, 32, 64])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_block_sizes(block_size: int, head_dim: int) -> None:
    check(paged_case([1, 64, 65, 200], [1, 1, 65, 3], heads=(2, 1), head_dim=head_dim, block_size=block_size))


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 127, 128, 129])
def test_a_prompt_without_a_cached_prefix_and_one_with(length: int) -> None:
    check(paged_case([length, length + 50], [length, length], heads=(3, 1), head_dim=16))


def test_rows_of_no_sequence_are_neither_read_nor_written() -> None:
    case = paged_case([20], [1], heads=(2, 1))
    out = torch.full((3, 2, 16), torch.nan)
    part = triton_paged.DecodePart(
        block_tables=torch.full((3, 4), 2**31 - 1, dtype=torch.int32),
        context_lens=torch.tensor([0, 20, 0], dtype=torch.int32),
        rows=torch.tensor([2**30, 1, -1], dtype=torch.int32),
        max_context_len=2000,
    )
    part.block_tables[1, :2] = case.tables[0]
    q = torch.full((3, 2, 16), torch.nan)
    q[1] = case.q[0]
    partial = triton_paged.PartialResults(q.device)
    partial.reserve(3, 2, 4, 16)

    triton_paged.attend_decode(q, case.kv.pool[:, LAYER], None, part, case.scoring, 512, partial, out, 90)

    assert out.isfinite().flatten(1).all(dim=1).tolist() == [False, True, False]
    torch.testing.assert_close(out[1:2], case.expected(), rtol=2e-6, atol=2e-6)


def test_a_sequences_result_does_not_depend_on_its_batch() -> None:
    alone = paged_case([700], [1], heads=(2, 1))
    others = torch.randn(2, 2, 16)
    args = alone.kv.pool, LAYER

    one = triton_paged.paged_attention(alone.q, *args, alone.tables, [0, 1], [700], alone.scoring)
    three = triton_paged.paged_attention(
        torch.cat((others, alone.q)),
        *args,
        [alone.tables[0][:1], alone.tables[0][:40], alone.tables[0]],
        [0, 1, 2, 3],
        [7, 600, 700],
        alone.scoring,
    )

    assert torch.equal(three[2:], one)


def test_the_tiles_with_the_most_keys_come_first() -> None:
    assert plan.prefill_tiles([5, 1, 3], [5, 100, 90], 2) == ([2, 2, 0, 0, 0], [2, 0, 4, 2, 0])


@pytest.mark.parametrize(
    ("longest", "window", "splits"), [(1, None, 1), (512, None, 1), (513, None, 2), (4000, 512, 2), (4000, 513, 3)]
)
def test_number_of_splits(longest: int, window: int | None, splits: int) -> None:
    assert plan.num_splits_for(longest, window, 512) == splits


@pytest.mark.parametrize(("longest", "keys"), [(100, 512), (32768, 512), (40000, 1024), (131072, 2048)])
def test_splits_of_the_longest_context_stay_few(longest: int, keys: int) -> None:
    assert plan.split_keys_for(longest) == keys
    assert plan.num_splits_for(longest, None, keys) <= plan.MAX_SPLITS
