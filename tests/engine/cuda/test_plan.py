from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from engine.cuda.plan import GpuMemory, GraphKey, InputLayout, decode_buckets, graph_key, pool_bytes
from engine.errors import ConfigError

GIB = 1 << 30
CARD = GpuMemory(total=80 * GIB, used=GIB // 2, peak=20 * GIB)


def test_the_pool_has_what_the_utilization_leaves_beside_all_that_was_measured() -> None:
    assert pool_bytes(CARD, 0.5, GIB, 1024) == int((40 - 0.5 - 20 - 1) * GIB)


def test_a_worker_has_its_share_of_a_card_whoever_was_there_first() -> None:
    after_another = replace(CARD, used=CARD.used + 40 * GIB)
    assert pool_bytes(after_another, 0.45, GIB, 1024) == pool_bytes(CARD, 0.45, GIB, 1024)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.6 is more than other .* most 0\.50"):
        pool_bytes(after_another, 0.6, GIB, 1024)


@pytest.mark.parametrize("utilization", [0.0, -1.0, 1.01, float("nan")])
def test_a_utilization_outside_of_the_card_is_refused_by_name(utilization: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be in"):
        pool_bytes(CARD, utilization, 0, 1024)


def test_a_card_without_room_for_a_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"leaves 0 for KV beside \d+ .* a block needs 1024"):
        pool_bytes(CARD, 0.2, GIB, 1024)


@pytest.mark.parametrize(
    ("most", "buckets"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_buckets_end_with_the_largest_batch(most: int, buckets: tuple[int, ...]) -> None:
    assert decode_buckets(most) == buckets


@pytest.mark.parametrize(
    ("num_seqs", "longest", "key"),
    [
        (1, 1, GraphKey(1, 1)),
        (3, 512, GraphKey(4, 1)),
        (5, 513, GraphKey(8, 2)),
        (8, 2000, GraphKey(8, 4)),
        (8, 2049, GraphKey(8, 8)),
        (9, 1, None),
    ],
)
def test_a_step_takes_the_smallest_graph_that_holds_it(num_seqs: int, longest: int, key: GraphKey | None) -> None:
    assert graph_key(num_seqs, longest, (1, 2, 4, 8), 512) == key


def test_fields_of_the_input_buffer_are_aligned_and_do_not_overlap() -> None:
    layout = InputLayout(max_num_seqs=7, max_blocks=5)
    fields = list(layout.fields().values())
    assert all(field.offset % 16 == 0 for field in fields)
    assert all(one.end(7) <= two.offset for one, two in pairwise(fields))
    assert fields[-1].name == "block_tables"
    assert layout.nbytes == fields[-1].end(7)


def test_a_step_copies_only_the_tables_of_its_rows() -> None:
    layout = InputLayout(max_num_seqs=8, max_blocks=1000)
    assert layout.nbytes - layout.used_bytes(2) == 6 * 1000 * 4
