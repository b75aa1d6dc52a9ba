"""10,000 random schedules of the hand-over. `make explore` plays a million."""

from __future__ import annotations

import pytest
from explorer.explore import exploring, play_seed

SCHEDULES = 10_000
PARTS = 20
"""Each within the time that a test has."""


@pytest.mark.parametrize("part", range(PARTS))
def test_no_random_schedule_breaks_an_invariant(part: int) -> None:
    def explore() -> None:
        for seed in range(part * SCHEDULES // PARTS, (part + 1) * SCHEDULES // PARTS):
            failure = play_seed(seed)
            assert failure is None, f"python -m tests.explore --seed {seed}\n{failure}"

    exploring(explore)
