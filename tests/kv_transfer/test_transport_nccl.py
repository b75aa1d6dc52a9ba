"""NCCL on a machine without a GPU: which calls it gets and in which order, and that torch has them."""

from __future__ import annotations

import ast
import inspect
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from card_pools import calls_of, card_pool, linked
from kv_links import SETTINGS, Adopted, Done, Failed, decode_side, in_time, outgoing, prefill_side, ticket
from nccl_stand_in import NcclOverGloo, RecordedWork, RecordingNccl, install
from torch._C import _distributed_c10d as c10d

from engine.errors import ConfigError, LinkClosed
from kv_transfer.link import LinkSettings
from kv_transfer.transport_nccl import NcclGroup

DEVICE = torch.device("cuda", 3)
STORE = c10d.HashStore()
WAIT_S = 20.0
NEVER = 10**9
NCCL_SETTINGS = LinkSettings(handshake_timeout_s=5.0, transports=("nccl", "tcp"))


def connected(
    monkeypatch: pytest.MonkeyPatch, nccl: RecordingNccl, rank: int = 0, timeout_s: float = WAIT_S, gone: bool = False
) -> NcclGroup:
    install(monkeypatch, nccl)
    group = NcclGroup.connect(STORE, rank, DEVICE, timeout_s, lambda: gone)
    nccl.calls.clear()
    return group


def blocks(count: int) -> list[torch.Tensor]:
    return list(torch.zeros(count, 64, dtype=torch.uint8))


def test_the_communicator_is_made_at_once_on_the_pool_s_device_without_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = RecordingNccl()
    devices = install(monkeypatch, nccl)

    NcclGroup.connect(STORE, 1, DEVICE, 3.0, lambda: False)

    assert devices == ["cuda:3"]
    assert nccl.calls == [("construct", 1, 2, timedelta(seconds=3), 0), ("connect", "cuda:3")]


@pytest.mark.parametrize(("rank", "operation"), [(0, "send"), (1, "recv")])
def test_a_group_of_blocks_is_one_launch_with_a_whole_block_each(
    monkeypatch: pytest.MonkeyPatch, rank: int, operation: str
) -> None:
    nccl = RecordingNccl(work=RecordedWork(looks=3))
    group = connected(monkeypatch, nccl, rank)
    tensors = blocks(3)

    (group.send if operation == "send" else group.receive)(tensors, WAIT_S)

    each = [(operation, [tensor.data_ptr()], 1 - rank, 0) for tensor in tensors]
    assert nccl.calls == [("start",), *each, ("end",)]


@pytest.mark.parametrize(
    ("nccl", "reason"),
    [
        (RecordingNccl(work=RecordedWork(error=RuntimeError("a broken work"))), "a broken work"),
        (RecordingNccl(error=c10d.ErrorType.REMOTE_ERROR), "REMOTE_ERROR"),
    ],
)
def test_an_error_of_nccl_ends_the_group_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, nccl: RecordingNccl, reason: str
) -> None:
    group = connected(monkeypatch, nccl)

    with pytest.raises(LinkClosed, match=reason):
        group.send(blocks(1), WAIT_S)

    assert nccl.calls[-1] == ("abort",)
    with pytest.raises(LinkClosed, match="over"):
        group.send(blocks(1), WAIT_S)


def test_a_launch_that_fails_leaves_nothing_coalescing(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordingNccl()

    def fail() -> None:
        raise RuntimeError("an invalid argument")

    nccl.sending = fail
    group = connected(monkeypatch, nccl)

    with pytest.raises(LinkClosed, match="an invalid argument"):
        group.send(blocks(2), WAIT_S)

    assert [call[0] for call in nccl.calls] == ["start", "send", "end", "abort"]


def test_a_peer_that_takes_nothing_is_given_up_at_the_deadline_by_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aborted_by: list[str] = []
    nccl = RecordingNccl(work=RecordedWork(looks=NEVER))
    group = connected(monkeypatch, nccl)
    monkeypatch.setattr(nccl, "abort", lambda: aborted_by.append(threading.current_thread().name))

    with pytest.raises(LinkClosed, match="aborted"):
        group.send(blocks(1), timeout_s=0.05)

    assert len(aborted_by) == 1
    assert aborted_by != [threading.current_thread().name]


def test_an_abort_from_another_thread_ends_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    nccl = RecordingNccl(work=RecordedWork(looks=NEVER, look=looked.set))
    group = connected(monkeypatch, nccl)

    def abort() -> None:
        assert looked.wait(WAIT_S)
        group.abort()

    aborter = threading.Thread(target=abort)
    aborter.start()
    with pytest.raises(LinkClosed, match="aborted"):
        group.receive(blocks(1), timeout_s=3600.0)
    aborter.join(WAIT_S)

    group.abort()
    group.close()
    assert nccl.calls.count(("abort",)) == 1


def test_the_end_of_the_control_connection_ends_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordingNccl(work=RecordedWork(looks=NEVER))
    group = connected(monkeypatch, nccl, gone=True)

    with pytest.raises(LinkClosed, match="the peer closed the link"):
        group.receive(blocks(1), timeout_s=3600.0)

    assert nccl.calls[-1] == ("abort",)


def test_a_peer_that_does_not_connect_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted = threading.Event()
    nccl = RecordingNccl()
    nccl.connecting = lambda: assert_set(aborted)
    monkeypatch.setattr(nccl, "abort", aborted.set)
    install(monkeypatch, nccl)

    with pytest.raises(LinkClosed, match=r"no NCCL communicator within 0.05 s"):
        NcclGroup.connect(STORE, 0, DEVICE, 0.05, lambda: False)


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "nobody came to the rescue"


def test_closing_a_group_that_is_well_aborts_it_rather_than_wait_for_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = RecordingNccl()
    group = connected(monkeypatch, nccl)

    group.close()
    group.close()

    assert nccl.calls == [("abort",)]


def test_two_pools_on_gpus_are_linked_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = install(monkeypatch, NcclOverGloo)
    source, target = card_pool(1), card_pool(0)
    with linked(source, target, NCCL_SETTINGS) as pair:
        done = pair.send("nccl", [9, 3, 17])

        assert isinstance(done, Done)
        assert done.stats.transport == "nccl"
        assert pair.received.next() == Adopted("t", 0, source.layout.block_bytes, "nccl")
        assert pair.arrived([9, 3, 17])
        assert sorted(devices) == ["cuda:0", "cuda:1"]
    # Nothing is pinned, and nothing copied to the host.
    assert [calls_of(pool)[1:] for pool in (source, target)] == [["in order after mark 1"]] * 2


def test_a_peer_that_hangs_in_nccl_costs_its_link_alone_and_the_worker_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = RecordingNccl(work=RecordedWork(looks=NEVER))
    install(monkeypatch, nccl)
    source, target = card_pool(1), card_pool(0)
    with linked(source, target, replace(NCCL_SETTINGS, progress_timeout_s=0.3)) as pair:
        failed = pair.send("nccl", [9, 3])

        assert isinstance(failed, Failed)
        assert failed.error is LinkClosed
        assert ("abort",) in nccl.calls
        assert isinstance(pair.send("tcp", [5], "again"), Done)
        assert pair.arrived([5])


def test_a_gpu_without_nccl_goes_on_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.ProcessGroupNCCL", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    source, target = card_pool(1), card_pool(0)
    with linked(source, target, NCCL_SETTINGS) as pair:
        done = pair.send("", [9])

        assert isinstance(done, Done)
        assert (done.stats.transport, pair.sender.stats().fallbacks) == ("tcp", 1)
        assert pair.arrived([9])


def test_a_pool_in_host_memory_does_not_offer_nccl() -> None:
    with decode_side(NCCL_SETTINGS) as decode, prefill_side(SETTINGS) as prefill:
        expected = decode.expect("t", [9])
        prefill.sender.open("t", ticket("t", decode.receiver.endpoint(), expected), in_time())
        prefill.sender.send("t", outgoing([0]))
        prefill.sender.finish("t")

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert (done.stats.transport, prefill.sender.stats().fallbacks) == ("tcp", 0)


def test_a_worker_with_no_possible_transport_does_not_start() -> None:
    with (
        pytest.raises(ConfigError, match="none of the transports nccl is possible: the KV pool is on cpu"),
        decode_side(LinkSettings(transports=("nccl",))),
    ):
        pass


def test_the_installed_torch_has_every_name_that_we_call() -> None:
    for name in ("send", "recv", "abort", "eager_connect_single_device", "_start_coalescing", "_end_coalescing"):
        assert callable(getattr(c10d.Backend, name)), name
    for name in ("is_completed", "exception"):
        assert callable(getattr(c10d.Work, name)), name
    assert {"SUCCESS", "TIMEOUT", "COMM_ERROR", "REMOTE_ERROR"} <= set(c10d.ErrorType.__members__)


def test_torch_s_own_stub_has_the_names_that_a_build_without_nccl_lacks() -> None:
    """`ProcessGroupNCCL` and `get_error` exist only in a build with NCCL; their stub is in every build."""
    stub = ast.parse(Path(inspect.getfile(torch)).parent.joinpath("_C/_distributed_c10d.pyi").read_text())
    classes = {node.name: node for node in ast.walk(stub) if isinstance(node, ast.ClassDef)}
    nccl = classes["ProcessGroupNCCL"]
    constructor = next(node for node in nccl.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [argument.arg for argument in constructor.args.args] == ["self", "store", "rank", "size", "options"]
    assert {"abort", "Options"} <= names_in(nccl)
    assert "blocking" in names_in(classes["NCCLConfig"])
    assert "get_error" in names_in(classes["Backend"])


def names_in(node: ast.ClassDef) -> set[str]:
    named = {child.name for child in node.body if isinstance(child, ast.FunctionDef | ast.ClassDef)}
    targets = {
        child.target.id for child in node.body if isinstance(child, ast.AnnAssign) if isinstance(child.target, ast.Name)
    }
    return named | targets
