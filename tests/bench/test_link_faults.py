"""A part of the long run of `bench.link_faults`, and whether it would notice what it looks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.link_faults import GOALS, RATE, run
from bench.report import Report
from engine.errors import NativeUnavailable
from kv_transfer.digest import DIGEST_BYTES, PythonBlockCopier
from kv_transfer.faults import FaultKind, FaultPlan
from kv_transfer.frame_socket import FrameSocket

FAULTS = 1000


def without_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(cache: Path) -> None:
        raise NativeUnavailable("not wanted here")

    monkeypatch.setattr("bench.link_faults.load_block_copier", load)


def test_links_survive_mixed_faults() -> None:
    report = Report("link_faults", GOALS)

    run(FAULTS, FaultPlan(rate=RATE, seed=1), report)

    assert report.figures["faults"] >= FAULTS
    assert all(report.figures[f"faults_{kind}"] > 0 for kind in FaultKind)
    assert {goal.name: report.figures[goal.name] for goal in GOALS} == {goal.name: 0.0 for goal in GOALS}, report.notes


def test_a_receiver_that_compares_no_digests_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(self: PythonBlockCopier, blocks: Sequence[memoryview]) -> list[bytes]:
        return [bytes(DIGEST_BYTES)] * len(blocks)

    without_native_code(monkeypatch)
    monkeypatch.setattr(PythonBlockCopier, "digests", equal)
    report = Report("link_faults", GOALS)

    run(100, FaultPlan(rate=0.1, kinds=(FaultKind.FLIP,)), report)

    assert report.figures["wrong_adoptions"] > 0


def test_connections_that_stay_open_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_native_code(monkeypatch)
    monkeypatch.setattr(FrameSocket, "close", FrameSocket.shut_down)
    report = Report("link_faults", GOALS)
    kept: list[FrameSocket] = []
    made = FrameSocket.__init__

    def keep(self: FrameSocket, *args: object) -> None:
        made(self, *args)  # type: ignore[arg-type]
        kept.append(self)

    monkeypatch.setattr(FrameSocket, "__init__", keep)

    run(1, FaultPlan(rate=0.1, kinds=(FaultKind.DUPLICATE,)), report)

    assert report.figures["leaks"] > 0
    monkeypatch.undo()
    for connection in kept:
        FrameSocket.close(connection)
