from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from roles import make_config, make_parts
from worker_process import make_tiny_model

from decode_worker.actor import DecodeActor
from decode_worker.worker import DecodeWorker
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.native.blocks import load_block_copier
from prefill_worker.actor import PrefillActor
from worker.config import WorkerConfig
from worker.process import RunningWorker


def make_worker(built: list[DecodeWorker]) -> Callable[[WorkerConfig], DecodeWorker]:
    def build(config: WorkerConfig) -> DecodeWorker:
        built.append(DecodeWorker(config, make_parts()))
        return built[-1]

    return build


async def test_a_worker_is_reachable_while_it_runs_and_not_after_it_stopped() -> None:
    worker = RunningWorker(make_config(drain_s=0.0), make_worker([]))
    report = await worker.start()
    host, _, port = report["address"].rpartition(":")
    socket.create_connection((host, int(port)), timeout=5).close()

    await worker.stop()
    await worker.stop()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


async def test_a_start_that_fails_gives_the_pool_and_the_links_back() -> None:
    built: list[DecodeWorker] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = make_config(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="in use"):
            await RunningWorker(config, make_worker(built)).start()

    assert built[0]._core.parts.kv.closed


async def test_a_host_that_is_not_ours_is_named() -> None:
    built: list[DecodeWorker] = []
    with pytest.raises(ConfigError, match=r"cannot accept links on 192\.0\.2\.1"):
        await RunningWorker(make_config(host="192.0.2.1"), make_worker(built)).start()

    assert built[0]._core.parts.kv.closed


@pytest.mark.parametrize(("actor_class", "role"), [(PrefillActor, "prefill"), (DecodeActor, "decode")])
async def test_an_actor_starts_and_stops_a_worker_and_its_tripwire_never_returns(
    tmp_path: Path, actor_class: type[Any], role: str
) -> None:
    engine = EngineConfig(model_path=str(make_tiny_model(tmp_path)), dtype="float32", num_blocks_override=8)
    actor = actor_class(WorkerConfig(worker_id="w7", model_name="tiny", engine=engine, drain_s=0.0))
    report = await actor.start()
    tripwire = asyncio.ensure_future(actor.until_gone())
    await actor.stop()
    done, _ = await asyncio.wait({tripwire}, timeout=0)
    tripwire.cancel()

    assert (report["worker_id"], report["role"], report["num_blocks"]) == ("w7", role, 8)
    assert not done


@pytest.mark.parametrize("actor_class", [PrefillActor, DecodeActor])
async def test_a_worker_says_what_native_code_it_has(tmp_path: Path, actor_class: type[Any]) -> None:
    native = load_block_copier(tmp_path / "native")
    engine = EngineConfig(
        model_path=str(make_tiny_model(tmp_path)),
        dtype="float32",
        num_blocks_override=8,
        native_cache=str(tmp_path / "native"),
    )
    actor = actor_class(WorkerConfig(worker_id="w7", model_name="tiny", engine=engine, drain_s=0.0))
    report = await actor.start()
    await actor.stop()

    assert report["native"] == native.name


async def test_a_worker_without_a_compiler_runs_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = EngineConfig(
        model_path=str(make_tiny_model(tmp_path)),
        dtype="float32",
        num_blocks_override=8,
        native_cache=str(tmp_path / "native"),
    )
    actor = DecodeActor(WorkerConfig(worker_id="w7", model_name="tiny", engine=engine, drain_s=0.0))
    report = await actor.start()
    await actor.stop()

    assert report["native"] == ""
    assert [record.message for record in caplog.records if "native" in record.message] == [
        "no native code, so KV blocks are copied and digested in Python: "
        "no compiler: none of cc, gcc, clang is on the path"
    ]
