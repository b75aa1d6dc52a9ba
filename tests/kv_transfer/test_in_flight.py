from __future__ import annotations

import pytest

from kv_transfer.in_flight import InFlight


@pytest.fixture
def flight() -> InFlight[str]:
    flight = InFlight[str]()
    flight.add("a", {0: "a0", 1: "a1"}, now=1.0)
    flight.add("b", {0: "b0"}, now=2.0)
    flight.add("a", {2: "a2"}, now=3.0)
    return flight


def test_an_answer_counts_once_and_for_its_ticket_only(flight: InFlight[str]) -> None:
    assert flight.answered("a", [1, 2, 0, 7], now=4.0) == {0, 1, 2}
    assert flight.answered("a", [1, 2], now=4.0) == set()
    assert (len(flight), flight.get("b", 0), flight.get("a", 0)) == (1, "b0", None)


def test_only_the_answer_to_the_oldest_block_is_progress(flight: InFlight[str]) -> None:
    flight.answered("a", [1, 2], now=4.0)
    flight.answered("b", [0], now=5.0)
    assert flight.progress_at == 1.0

    flight.answered("a", [0], now=6.0)

    assert (flight.progress_at, len(flight)) == (6.0, 0)
