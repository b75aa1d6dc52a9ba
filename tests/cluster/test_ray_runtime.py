from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from ray._private import state

from cluster import ray_runtime
from cluster.ray_runtime import RayRuntime


class Nodes:
    """Stands in for Ray's list of nodes that drain."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def get_draining_nodes(self) -> dict[str, int]:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(answer, 0)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayRuntime:
    """Of a Ray that was joined."""
    monkeypatch.setattr(ray_runtime, "DRAINING_POLL_S", 0.0)
    return RayRuntime(local=False, cluster_id="c", folder=tmp_path)


async def test_nodes_that_begin_to_drain_are_told(runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "state", Nodes([], ["n1"], ["n1"], ["n1", "n2"]))
    assert await runtime.leaving(frozenset()) == {"n1"}
    assert await runtime.leaving(frozenset({"n1"})) == {"n1", "n2"}


async def test_a_ray_that_cannot_tell_for_a_while_is_asked_again(
    runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "state", Nodes(OSError("away"), RuntimeError("closed"), ["n1"]))
    assert await runtime.leaving(frozenset()) == {"n1"}


async def test_a_ray_that_does_not_answer_holds_nobody_up(runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Hangs:
        def get_draining_nodes(self) -> dict[str, int]:
            answers.wait(10)
            return {}

    monkeypatch.setattr(state, "state", Hangs())
    watching = asyncio.create_task(runtime.leaving(frozenset()))
    await asyncio.wait({watching}, timeout=0)
    watching.cancel()
    await asyncio.wait({watching})
    assert watching.cancelled()
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "ray-nodes")
    answers.set()
