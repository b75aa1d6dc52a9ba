"""Random schedules of hand-overs without a copy: blocks that are lent, read, given back and taken back."""

from __future__ import annotations

import pytest
from explorer.explore import exploring, play_seed

from kv_transfer.identity import ADOPT

SCHEDULES = 600
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_no_random_schedule_breaks_an_invariant(part: int) -> None:
    def explore() -> None:
        for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
            failure = play_seed(seed, ADOPT)
            assert failure is None, f"python -m tests.explore --transport adopt --seed {seed}\n{failure}"

    exploring(explore)
