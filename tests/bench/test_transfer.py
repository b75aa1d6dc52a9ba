from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.report import Report
from bench.transfer import Cell, main, measure_peers


@pytest.mark.processes
def test_a_quick_run_measures_every_transport_and_sees_a_killed_sender() -> None:
    done = CliRunner().invoke(main, ["--quick", "--json"], catch_exceptions=False)

    figures = json.loads(done.output.splitlines()[-1])["figures"]
    cells = {f"{transport}_rel_{size}_{n}" for transport in ("shm", "tcp") for size in ("360k", "2m") for n in (1, 4)}
    again = {cell.replace("rel", f"{kind}_rel") for cell in cells for kind in ("again", "lazy")}
    again |= {f"digest_us_{size}_{n}" for size in ("360k", "2m") for n in (1, 4)}
    lent = {"adopt_us", "adopt_floor_us", *(f"adopt_us_{size}_{n}" for size in ("360k", "2m") for n in (1, 4))}
    assert figures.keys() == cells | again | lent | {"digest_percent", "digest_lazy_percent", "kill_seen_ms"}
    assert all(figures[cell] > 0 for cell in cells | lent)
    assert figures["kill_seen_ms"] > 0


def test_a_ratio_is_of_medians_and_a_share_is_of_the_whole() -> None:
    cell = Cell(
        memcpy=[1.0, 2.0, 9.0],
        transports={"shm": [4.0, 5.0, 3.0]},
        lazy={"shm": [3.0, 3.0, 3.75]},
        unchecked={"shm": [1.0, 3.0, 4.0]},
    )

    assert cell.rel(cell.transports["shm"]) == 0.5
    assert cell.digest_percent("shm") == 25.0
    assert cell.digest_lazy_percent("shm") == 0.0


def test_peers_that_are_not_installed_are_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.peers.ENVIRONMENTS", tmp_path)
    report = Report("transfer")
    measure_peers(report)

    assert report.notes == [
        "nixl was not measured: nixl is not installed (make bench-peers)",
        "mooncake was not measured: mooncake is not installed (make bench-peers)",
    ]
    assert report.figures == {}
