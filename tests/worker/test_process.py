from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import psutil
import pytest
from roles import BOUND_S, fill, sampling
from worker_process import WorkerProcess, make_tiny_model, wait_gone

from kvrelay._wire import PROTOCOL_VERSION
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def connect(address: str) -> grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]:
    call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse]
    call = worker_pb2_grpc.WorkerStub(grpc.aio.insecure_channel(address)).Session(timeout=BOUND_S)
    return call


async def read_to_the_end(
    call: grpc.aio.StreamStreamCall[worker_pb2.SessionRequest, worker_pb2.SessionResponse],
) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_says_who_it_is_and_sigterm_leaves_nothing(model: Path, role: str) -> None:
    with WorkerProcess(role, model, "--worker-id", "w7") as worker:
        ready = worker.ready
        children = psutil.Process(ready["pid"]).children(recursive=True)
        worker.send(signal.SIGTERM)
        code, errors = worker.wait()

    assert (ready["worker_id"], ready["role"], ready["num_blocks"]) == ("w7", role, 256)
    assert ready["pid"] == worker.process.pid
    assert ready["pool"].startswith("256 blocks of ")
    assert {"model_s", "total_s"} <= ready["timings"].keys()
    assert (code, errors) == (0, "")
    assert children == []
    host, _, port = ready["address"].rpartition(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=BOUND_S)


async def test_sigterm_in_the_middle_of_a_stream_tells_the_router_and_exits(model: Path) -> None:
    with WorkerProcess("decode", model, "--drain-s", "0") as worker:
        call = connect(worker.ready["address"])
        await call.write(worker_pb2.SessionRequest(hello=worker_pb2.Hello(protocol=PROTOCOL_VERSION, router_id="r0")))
        reserve = fill(worker_pb2.Reserve(), "a", [5] * 20, compute_here=True, sampling=sampling(max_tokens=400))
        await call.write(worker_pb2.SessionRequest(reserve=reserve))
        while True:
            message = await call.read()
            assert isinstance(message, worker_pb2.SessionResponse)
            if message.HasField("step"):
                break
        worker.send(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_the_end(call)
        exit_code, errors = worker.wait()

    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert (exit_code, errors) == (0, "")


def test_a_port_in_use_is_named_in_one_line(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with WorkerProcess("prefill", model, "--port", str(port), "--worker-id", "w7") as worker:
            code, errors = worker.wait()

    assert code == 1
    *_, last = errors.splitlines()  # gRPC adds a line of its own
    assert last.startswith(f"w7: ConfigError: cannot listen on 127.0.0.1:{port}")
    assert "Traceback" not in errors


def test_a_missing_model_is_named_in_one_line(tmp_path: Path) -> None:
    with WorkerProcess("decode", tmp_path / "nowhere", "--worker-id", "w7") as worker:
        code, errors = worker.wait()

    assert code == 1
    assert errors.startswith("w7: ModelError: ")
    assert str(tmp_path / "nowhere") in errors
    assert len(errors.splitlines()) == 1


def test_a_worker_does_not_outlive_a_parent_that_was_killed(model: Path) -> None:
    launch = (
        "import subprocess, sys; process = subprocess.Popen([sys.executable, '-m', 'decode_worker', *sys.argv[1:]],"
        " stdout=subprocess.PIPE, text=True); print(process.pid, process.stdout.readline(), flush=True); process.wait()"
    )
    flags = ["--model", str(model), "--num-blocks-override", "64", "--exit-with-parent"]
    with subprocess.Popen([sys.executable, "-c", launch, *flags], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        try:
            parent.kill()
            gone = wait_gone(pid)
        finally:
            if psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)

    assert gone
