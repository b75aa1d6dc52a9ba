"""The router as a process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import grpc
import pytest
from fakes import make_model_folder

from kvrelay.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


class Processes:
    def __init__(self) -> None:
        self._started: list[asyncio.subprocess.Process] = []

    async def start(self, *arguments: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        self._started.append(process)
        return process

    async def close(self) -> None:
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.communicate()
        assert all(process.returncode is not None for process in self._started)


@pytest.fixture
async def processes() -> AsyncIterator[Processes]:
    processes = Processes()
    yield processes
    await processes.close()


async def ready_line(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    async with asyncio.timeout(30):
        report: dict[str, object] = json.loads(await process.stdout.readline())
    return report


async def test_a_router_says_where_it_listens_and_ends_on_sigterm(processes: Processes, folder: Path) -> None:
    process = await processes.start("-m", "router", "--model", str(folder), "--model-name", "fake", "--router-id", "r")
    report = await ready_line(process)
    assert set(report) == {"address", "http_address", "router_id", "pid", "prefix_index"}
    assert (report["router_id"], report["pid"], report["prefix_index"]) == ("r", process.pid, "native")
    async with aiohttp.ClientSession() as http, http.get(f"http://{report['http_address']}/v1/models") as response:
        assert [card["id"] for card in (await response.json())["data"]] == ["fake"]
    async with grpc.aio.insecure_channel(str(report["address"])) as channel:
        stub: router_pb2_grpc.RouterAsyncStub = router_pb2_grpc.RouterStub(channel)
        (model,) = (await stub.ListModels(router_pb2.ListModelsRequest(), timeout=5)).models
    assert (model.name, len(model.fingerprint)) == ("fake", 32)
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(10):
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert output == b""


async def test_a_port_in_use_is_said_and_exits_1(processes: Processes, folder: Path) -> None:
    first = await processes.start("-m", "router", "--model", str(folder))
    address = str((await ready_line(first))["address"])
    second = await processes.start("-m", "router", "--model", str(folder), "--port", address.rpartition(":")[2])
    async with asyncio.timeout(30):
        output, errors = await second.communicate()
    assert second.returncode == 1
    assert output == b""
    assert f"cannot listen on {address}: the port is in use" in errors.decode()


async def test_a_folder_that_holds_no_model_is_said_and_exits_1(processes: Processes, tmp_path: Path) -> None:
    process = await processes.start("-m", "router", "--model", str(tmp_path))
    async with asyncio.timeout(30):
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"{tmp_path}/config.json is missing" in errors.decode()


async def test_the_router_runs_without_torch_and_ray(processes: Processes) -> None:
    code = "import sys, router.__main__; print(sorted({'torch', 'ray', 'transformers'} & sys.modules.keys()))"
    process = await processes.start("-c", code)
    output, errors = await process.communicate()
    assert output.strip() == b"[]", errors.decode()
