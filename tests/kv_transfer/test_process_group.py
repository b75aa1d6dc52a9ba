"""Two ranks without a world: how they meet over the link's connection, and how an exchange ends."""

from __future__ import annotations

import gc
import os
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from descriptors import open_descriptors, opened_since
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_links import WAIT_S
from torch._C._distributed_c10d import Store

from engine.errors import LinkClosed, ProtocolError, TransferError
from kv_transfer.frame_socket import FrameSocket
from kv_transfer.frames import Abort, Meet, encode
from kv_transfer.process_group import PairStore, meet
from kv_transfer.transport_gloo import GlooGroup, check_introduction

SHORT_S = 0.05


@pytest.fixture
def ends() -> Iterator[tuple[FrameSocket, FrameSocket]]:
    pair = [FrameSocket(sock, WAIT_S) for sock in socket.socketpair()]
    yield pair[0], pair[1]
    for end in pair:
        end.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=2) as executor:
        yield executor


def join(connection: FrameSocket, rank: int, timeout_s: float = WAIT_S) -> GlooGroup:
    def construct(store: Store) -> GlooGroup:
        return GlooGroup.connect(store, rank, "127.0.0.1", timeout_s)

    return meet(connection, "a/b", construct, check_introduction)


@pytest.fixture
def pair(ends: tuple[FrameSocket, FrameSocket], threads: ThreadPoolExecutor) -> Iterator[tuple[GlooGroup, GlooGroup]]:
    joining: Future[GlooGroup] = threads.submit(join, ends[0], 0)
    second = join(ends[1], 1)
    first = joining.result(WAIT_S)
    yield first, second
    first.close()
    second.close()


def test_what_one_rank_sends_the_other_receives_in_order(
    pair: tuple[GlooGroup, GlooGroup], threads: ThreadPoolExecutor
) -> None:
    source = torch.arange(4 * 1000).to(torch.uint8).view(4, 1000)
    target = torch.zeros_like(source)

    sending = threads.submit(pair[0].send, list(source), WAIT_S)
    pair[1].receive([target[3], target[0], target[1], target[2]], WAIT_S)
    sending.result(WAIT_S)

    assert torch.equal(target, source[[1, 2, 3, 0]])


@pytest.mark.parametrize("operation", ["send", "receive"])
def test_an_exchange_that_the_peer_takes_no_part_in_ends_at_its_deadline_and_the_group_with_it(
    pair: tuple[GlooGroup, GlooGroup], operation: str
) -> None:
    with pytest.raises(LinkClosed, match="the group failed"):
        getattr(pair[0], operation)([torch.zeros(10, dtype=torch.uint8)], SHORT_S)

    with pytest.raises(LinkClosed, match="the group is over"):
        pair[0].send([torch.zeros(10, dtype=torch.uint8)], WAIT_S)


def test_nothing_is_exchanged_after_an_abort_from_another_thread(
    pair: tuple[GlooGroup, GlooGroup], threads: ThreadPoolExecutor
) -> None:
    threads.submit(pair[0].abort).result(WAIT_S)

    with pytest.raises(LinkClosed, match="the group is over"):
        pair[0].receive([torch.zeros(10, dtype=torch.uint8)], WAIT_S)


def test_groups_leave_no_thread_and_no_descriptor_behind(
    ends: tuple[FrameSocket, FrameSocket], threads: ThreadPoolExecutor
) -> None:
    def once() -> int:
        joining = threads.submit(join, ends[0], 0)
        groups = [join(ends[1], 1), joining.result(WAIT_S)]
        with pytest.raises(LinkClosed):
            groups[0].receive([torch.zeros(10, dtype=torch.uint8)], SHORT_S)
        for group in groups:
            group.close()
        return len(os.listdir("/proc/self/task"))

    threads_left, before = once(), open_descriptors()
    assert once() == threads_left
    assert not opened_since(before)


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ("is silent", "does not take part"),
        ("introduces itself and is gone", "no group"),
        ("hangs up", "sending failed"),
    ],
)
def test_a_group_that_does_not_come_about_leaves_no_descriptor_to_the_garbage_collector(
    ends: tuple[FrameSocket, FrameSocket], peer: str, reason: str
) -> None:
    ends[0].set_timeout(SHORT_S)
    with suppress(LinkClosed):
        join(ends[0], 0)
    ours = ends[1].receive()
    assert isinstance(ours, Meet)
    if peer == "introduces itself and is gone":
        ends[1].send(encode(replace(ours, key=ours.key[:-1] + "1")))
    elif peer == "hangs up":
        ends[1].shut_down()
    gc.collect()
    gc.disable()
    try:
        before = open_descriptors()
        with pytest.raises(LinkClosed, match=reason) as failure:
            join(ends[0], 0, SHORT_S)
        assert not opened_since(before), failure.value
    finally:
        gc.enable()


def test_a_peer_that_says_nothing_is_given_up_in_time() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = FrameSocket(ours, SHORT_S)
        with pytest.raises(LinkClosed, match="does not take part"):
            join(connection, 0)
        connection.close()


@pytest.mark.parametrize(
    "said",
    [
        encode(Abort(ticket_id="t")),
        encode(Meet(key="k", value=b"v")) * 2,
        b"\xff" * 8,
    ],
    ids=["another frame", "a key twice", "no frame"],
)
def test_a_peer_that_talks_of_something_else_is_given_up(ends: tuple[FrameSocket, FrameSocket], said: bytes) -> None:
    ends[1].send(said)

    with pytest.raises(ProtocolError):
        join(ends[0], 0)


def introduction(host: bytes = b"vm", port: int = 1, **parts: bytes) -> bytes:
    """As Gloo writes it; `parts` in place of what belongs there."""
    sockaddr = struct.pack("=H", socket.AF_INET) + port.to_bytes(2, "big") + socket.inet_aton("127.0.0.1")
    sound = {
        "name": struct.pack("=Q", len(host)) + host,
        "size": struct.pack("=Q", 136),
        "sockaddr": sockaddr.ljust(128, b"\0"),
        "number": struct.pack("=q", -1),
        "pairs": struct.pack("=QQ", 0, 1),
    }
    return b"".join((sound | parts).values())


def rank_one_hears(said: bytes, key: str = "a/b/0/0") -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode(Meet(key=key, value=said)))
        theirs.shutdown(socket.SHUT_WR)
        connection = FrameSocket(ours, WAIT_S)
        try:
            join(connection, 1, timeout_s=SHORT_S)
        finally:
            connection.close()


@settings(max_examples=60, deadline=None)
@given(
    said=st.one_of(
        st.binary(max_size=512),
        st.builds(
            introduction,
            st.binary(max_size=40),
            **{
                name: st.binary(min_size=size, max_size=size)
                for name, size in {"size": 8, "number": 8, "pairs": 16}.items()
            },
        ),
        st.builds(introduction, sockaddr=st.binary(max_size=140)),
        st.builds(introduction, name=st.binary(max_size=40)),
    )
)
def test_an_introduction_of_another_form_never_reaches_gloo(said: bytes) -> None:
    """Gloo crashes on some of these."""
    with pytest.raises(ProtocolError):
        rank_one_hears(said)


@settings(max_examples=20, deadline=None)
@given(
    host=st.binary(max_size=255), port=st.integers(min_value=0, max_value=65535), key=st.sampled_from(["a/b/0/0", "x"])
)
def test_an_address_where_nobody_is_is_a_link_that_does_not_come_about(host: bytes, port: int, key: str) -> None:
    with pytest.raises(TransferError):
        rank_one_hears(introduction(host, port), key)


@pytest.mark.parametrize("keys", [["k", "k"], [str(number) for number in range(100)]], ids=["one twice", "too many"])
def test_a_store_takes_no_key_twice_and_few_keys(ends: tuple[FrameSocket, FrameSocket], keys: list[str]) -> None:
    store = PairStore(ends[0], lambda ours, theirs: None)
    ends[1].send(b"".join(encode(Meet(key=key, value=b"v")) for key in keys))

    with pytest.raises(ProtocolError, match="Meet while the group is built"):
        store.get("the right one")


def test_a_store_knows_nothing_new_once_the_group_is_built(ends: tuple[FrameSocket, FrameSocket]) -> None:
    store = PairStore(ends[0], lambda ours, theirs: None)
    ends[1].send(encode(Meet(key="k", value=b"v")))
    assert store.get("k") == b"v"
    store.seal()

    store.set("later", b"x")

    assert (store.get("k"), store.check(["k"]), store.check(["other"])) == (b"v", True, False)
    with pytest.raises(LinkClosed, match="nobody has told other"):
        store.get("other")
    assert not ends[1].has_frame()
