"""The reference kernels against dense float64 attention, over scattered blocks full of other sequences' leavings."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dense_reference import dense_attention

from engine.kernels.reference import paged_attention, store_kv
from engine.kernels.scoring import Scoring

NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Case:
    """Sequences in a pool whose unused slots hold NaN."""

    q: torch.Tensor  # [T, heads, head_dim]
    pool: torch.Tensor
    tables: list[torch.Tensor]
    query_starts: list[int]
    context_lens: list[int]
    keys: list[torch.Tensor]  # S of [context_len, kv_heads, head_dim]
    values: list[torch.Tensor]

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def attend(self, *, window: int | None = None, soft_cap: float | None = None) -> torch.Tensor:
        scoring = Scoring(self.scale, window, soft_cap)
        return paged_attention(self.q, self.pool, LAYER, self.tables, self.query_starts, self.context_lens, scoring)


def make_case(
    context_lens: list[int],
    query_lens: list[int],
    *,
    heads: tuple[int, int] = (6, 2),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    head_dim, generator, rng = 32, torch.Generator().manual_seed(1), random.Random(1)
    tables = [[0] * -(-length // block_size) for length in context_lens]
    free = rng.sample(range(3 + sum(map(len, tables))), sum(map(len, tables)))
    tables = [[free.pop() for _ in table] for table in tables]
    pool = torch.full((3 + sum(map(len, tables)), NUM_LAYERS, 2, heads[1], block_size, head_dim), torch.nan).to(dtype)
    keys, values = [], []
    for table, length in zip(tables, context_lens, strict=True):
        k, v = (torch.randn(length, heads[1], head_dim, generator=generator).to(dtype) for _ in range(2))
        blocks = torch.tensor(table)[torch.arange(length) // block_size]
        store_kv(k, v, pool, LAYER, blocks, torch.arange(length) % block_size)
        keys.append(k)
        values.append(v)
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return Case(
        q=torch.randn(starts[-1], heads[0], head_dim, generator=generator),
        pool=pool,
        tables=[torch.tensor(table) for table in tables],
        query_starts=starts,
        context_lens=context_lens,
        keys=keys,
        values=values,
    )


def expected(
    case: Case, window: int | None = None, soft_cap: float | None = None
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    starts = case.query_starts
    return np.concatenate(
        [
            dense_attention(
                case.q[starts[s] : starts[s + 1]].double().numpy(),
                case.keys[s].double().numpy(),
                case.values[s].double().numpy(),
                case.scale,
                window,
                soft_cap,
            )
            for s in range(len(case.tables))
        ]
    )


@pytest.mark.parametrize(
    ("context_lens", "query_lens"),
    [
        ([1], [1]),
        ([16], [1]),
        ([17], [1]),
        ([129], [1]),
        ([300], [1]),
        ([5], [5]),
        ([200], [70]),
        ([300], [300]),
        ([3, 64, 33, 128], [1, 64, 2, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
def test_attention_equals_the_dense_one(context_lens: list[int], query_lens: list[int], heads: tuple[int, int]) -> None:
    case = make_case(context_lens, query_lens, heads=heads)

    np.testing.assert_allclose(case.attend().numpy(), expected(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("block_size", [1, 2, 8, 32, 256])
def test_block_size_does_not_change_the_result(block_size: int) -> None:
    lens = ([37, 150], [1, 40])

    result = make_case(*lens, block_size=block_size).attend()

    assert torch.equal(result, make_case(*lens, block_size=16).attend())


def test_a_16_bit_pool_is_read_in_float32() -> None:
    case = make_case([150, 20], [3, 20], dtype=torch.bfloat16)

    np.testing.assert_allclose(case.attend().numpy(), expected(case), rtol=0, atol=1e-5)


def test_the_result_has_the_type_of_the_queries() -> None:
    case = make_case([40], [3])
    q = case.q.to(torch.bfloat16)

    result = paged_attention(q, case.pool, LAYER, case.tables, case.query_starts, case.context_lens, Scoring(32**-0.5))

    assert result.dtype == torch.bfloat16
    np.testing.assert_allclose(result.float().numpy(), expected(case), rtol=0, atol=0.05)


def test_a_query_gives_the_same_bits_whatever_queries_come_with_it() -> None:
    case = make_case([300], [300])
    all_at_once = case.attend()

    for first in (299, 298, 290, 250, 40):
        last = paged_attention(
            case.q[first:], case.pool, LAYER, case.tables, [0, 300 - first], [300], Scoring(32**-0.5)
        )
        assert torch.equal(last, all_at_once[first:])


LENGTHS = ([300, 20, 129, 40], [90, 20, 1, 3])


@pytest.mark.parametrize("window", [1, 7, 64, 128, 129, 1000])
@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_a_window_hides_what_lies_before_it_and_its_blocks_may_be_gone(window: int, block_size: int) -> None:
    case = make_case(*LENGTHS, block_size=block_size)
    for table, length, queries in zip(case.tables, *LENGTHS, strict=True):
        table[: max(0, length - queries + 1 - window) // block_size] = -1

    np.testing.assert_allclose(case.attend(window=window).numpy(), expected(case, window), rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [1, 50, 150])
def test_in_a_window_too_a_query_gives_the_same_bits_whatever_comes_with_it(window: int) -> None:
    case = make_case([400], [400])
    all_at_once = case.attend(window=window)

    for first in (399, 390, 340, 130):
        scoring = Scoring(case.scale, window)
        last = paged_attention(case.q[first:], case.pool, LAYER, case.tables, [0, 400 - first], [400], scoring)
        assert torch.equal(last, all_at_once[first:])


def test_a_soft_cap_bends_the_scores() -> None:
    case = make_case([60], [20])

    np.testing.assert_allclose(case.attend(soft_cap=0.5).numpy(), expected(case, None, 0.5), rtol=0, atol=1e-5)


def test_store_writes_its_slots_and_no_others() -> None:
    pool = torch.zeros(4, NUM_LAYERS, 2, 2, 8, 16, dtype=torch.bfloat16)
    k = torch.arange(3 * 2 * 16).view(3, 2, 16).float() + 1
    v = -k

    store_kv(k, v, pool, LAYER, torch.tensor([2, 2, 0]), torch.tensor([6, 7, 0]))

    for token, (block, offset) in enumerate([(2, 6), (2, 7), (0, 0)]):
        assert torch.equal(pool[block, LAYER, 0, :, offset], k[token].bfloat16())
        assert torch.equal(pool[block, LAYER, 1, :, offset], v[token].bfloat16())
    assert torch.count_nonzero(pool) == 2 * k.numel()
