"""All orders of the steps of one hand-over, to a stated depth, from each of its stages on, each run to its end."""

from __future__ import annotations

import pytest
from explorer.explore import exhaust, exploring
from explorer.faults import FAULTS
from explorer.world import Setup

STAGES = {"reserve": 0, "prefill": 6, "connect": 11, "send": 16, "write": 20, "start": 33}
"""How many steps of the undisturbed order come before."""
ONE = (((1, 2, 3), 2),)
TWO = (((1, 2, 3), 2), ((1, 2, 4), 1))


@pytest.mark.parametrize("stage", STAGES)
def test_no_order_of_4_steps_with_a_cancel_anywhere_breaks_an_invariant(stage: str) -> None:
    setup = Setup(requests=ONE, faults=("cancel",), max_faults=1)
    found = exploring(lambda: exhaust(setup, 4, (0,) * STAGES[stage]))
    assert found.failure is None, f"{setup}\n{found.failure}"
    assert found.num_schedules > 15


@pytest.mark.parametrize("stage", STAGES)
def test_no_order_of_3_steps_with_any_fault_breaks_an_invariant(stage: str) -> None:
    setup = Setup(requests=ONE, faults=tuple(FAULTS), max_faults=1)
    found = exploring(lambda: exhaust(setup, 3, (0,) * STAGES[stage]))
    assert found.failure is None, f"{setup}\n{found.failure}"
    assert found.num_schedules > 15


@pytest.mark.parametrize("stage", STAGES)
def test_no_order_of_4_steps_of_two_requests_on_two_pairs_breaks_an_invariant(stage: str) -> None:
    setup = Setup(requests=TWO, num_prefill=2, num_decode=2)
    found = exploring(lambda: exhaust(setup, 4, (0,) * STAGES[stage]))
    assert found.failure is None, f"{setup}\n{found.failure}"
    assert found.num_schedules > 15
