"""A cluster on a real Ray of several nodes, with real workers, changed while it serves."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_process import make_tiny_model

from bench.operations import (
    NODES,
    RESOURCE,
    WORKERS_A_NODE,
    Joined,
    joined,
    node_drain,
    node_kill,
    rolling_restart,
    router_restart,
    scale_up_and_down,
)
from bench.ray_nodes import node_environment, ray_nodes

pytestmark = pytest.mark.processes

POOL = {"kv_memory_bytes": 4 << 20, "block_size": 8}
SEEN_WITHIN_S = 3.0
"""The contract's bound; it takes 0.1 s on an idle machine."""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    model = tmp_path / "model"
    model.mkdir()
    environment = node_environment(secrets.token_hex(32)) | {"KVRELAY_HOME": str(tmp_path / "home")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with ray_nodes(NODES, {RESOURCE: WORKERS_A_NODE}, os.environ) as nodes:
        yield Joined(nodes.address, str(make_tiny_model(model)), POOL, dtype="float32")


async def test_no_request_fails_and_no_token_differs_while_pools_change_and_a_node_dies(cluster: Joined) -> None:
    """One test, because each start of a cluster takes seconds."""
    async with joined(cluster) as answers:
        scaled = await scale_up_and_down(cluster, answers, "decode")
        restarted = await rolling_restart(cluster, answers, max_num_seqs=32)
        over_grpc, over_http = await router_restart(cluster, answers, restarts=1)
        drained = await node_drain(cluster, answers)
        killed, seen_s = await node_kill(cluster, answers)

    for result in (scaled, restarted, over_grpc, over_http, drained, killed):
        assert (result.errors, result.wrong) == ([], 0)
        assert result.finished > 0
    assert killed.resumed > 0
    assert seen_s < SEEN_WITHIN_S
