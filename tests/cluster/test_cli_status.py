"""How `kvrelay status` fits a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from fake_router import STATUS
from rich.console import Console

from cluster import cli_status
from kvrelay.types import ClusterStatus

CLUSTER = ClusterStatus.from_proto(STATUS)


def printed(width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(cli_status.status_view(CLUSTER, width))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, cli_status.FULL_WIDTH])
def test_nothing_is_cut_off_where_there_are_80_columns_or_more(width: int) -> None:
    lines = printed(width)
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)


def test_a_narrow_terminal_shows_each_pool_as_a_bar() -> None:
    assert "prefill-0 prefill ready 1 2 █▒▒▒▒░░░░░░░ 10% 850 tok/s" in [" ".join(line.split()) for line in printed(80)]


@pytest.mark.parametrize(
    ("owned", "quarantined", "bar"), [(0, 0, "░" * 12), (1, 1, "█!" + "░" * 10), (99, 1, "█" * 12)]
)
def test_a_bar_of_blocks_shows_what_is_there_and_is_never_longer(owned: int, quarantined: int, bar: str) -> None:
    counts: dict[str, Any] = {"blocks_owned": owned, "blocks_quarantined": quarantined, "blocks_cached": 0}
    assert cli_status.blocks_bar(replace(CLUSTER.workers[0], **counts)).plain == bar
