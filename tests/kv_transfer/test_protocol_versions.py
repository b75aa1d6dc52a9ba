"""A worker of this version and one of the version before exchange blocks, whichever of them is the newer."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from kv_links import (
    FINGERPRINT,
    LAYOUT,
    NUM_BLOCKS,
    WAIT_S,
    Adopted,
    Done,
    Lost,
    MemoryPool,
    block_hash,
    decode_side,
    in_time,
    outgoing,
    prefill_side,
    same_bytes,
    ticket,
)
from kv_protocol1 import ACK, FINISH, RENEW, WELCOME, OldReceiver, Stream, block, hello, packed

from engine.errors import ProtocolError
from kv_transfer.frames import BlockEntry, Blocks, encode
from kv_transfer.identity import LinkEndpoint


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_older_sender_delivers_its_blocks(transport: str) -> None:
    source = MemoryPool()
    source.fill(seed=3)
    assert source.fd is not None
    with decode_side() as decode:
        decode.expect("t", [9, 2])
        endpoint = LinkEndpoint.decode(decode.receiver.endpoint())
        with socket.socket(socket.AF_UNIX if transport == "shm" else socket.AF_INET) as sock:
            stream = Stream(sock)
            greeting = hello(LAYOUT.to_wire(), FINGERPRINT, transport, NUM_BLOCKS)
            if transport == "shm":
                assert endpoint.unix_name is not None
                sock.connect(endpoint.unix_name)
                socket.send_fds(sock, [packed(greeting)], [source.fd])
            else:
                sock.connect((endpoint.host, endpoint.port))
                stream.send(*greeting)
            assert stream.receive() == [WELCOME, 1, []]
            stream.send(RENEW, ["t"])
            for ordinal, slot in enumerate([9, 2]):
                payload = bytes(source.block(ordinal))
                offset = ordinal * LAYOUT.block_bytes if transport == "shm" else None
                frame = block(ordinal, slot, block_hash(ordinal), payload, offset)
                stream.send(*frame, payload=b"" if transport == "shm" else payload)
                assert stream.receive() == [ACK, "t", [ordinal]]
            stream.send(FINISH, "t", 2)

            adopted = [decode.listener.next() for _ in range(2)]
            assert adopted == [Adopted("t", ordinal, LAYOUT.block_bytes, transport) for ordinal in range(2)]
            assert all(same_bytes(source, ordinal, decode.pool, slot) for ordinal, slot in enumerate([9, 2]))
    source.close()


def test_an_older_receiver_gets_a_frame_for_each_block() -> None:
    with decode_side() as decode, prefill_side() as prefill, OldReceiver() as old:
        endpoint = replace(LinkEndpoint.decode(decode.receiver.endpoint()), port=old.port, transports=("tcp",))
        prefill.sender.open("t", ticket("t", endpoint.encode(), {0: 9, 1: 2, 2: 5}), in_time())
        prefill.sender.send("t", outgoing([0, 1, 2]))
        prefill.sender.finish("t")

        done = prefill.listener.next()
        assert isinstance(done, Done)
        assert done.stats.blocks == 3
        blocks = [bytes(prefill.pool.block(ordinal)) for ordinal in range(3)]
    assert old.hello[1:3] == [2, 1]
    assert old.payloads == blocks
    assert old.frames == [
        block(ordinal, slot, block_hash(ordinal), blocks[ordinal], None) for ordinal, slot in enumerate([9, 2, 5])
    ]


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_frame_of_another_version_than_the_agreed_one_ends_the_link(protocol: int) -> None:
    payload = bytes(LAYOUT.block_bytes)
    entry = BlockEntry(0, 9, 1, block_hash(0), bytes(16), None)
    newer = encode(Blocks(ticket_id="t", incarnation="1", entries=(entry,), length=len(payload)))
    older = packed(block(0, 9, block_hash(0), payload, None))
    with decode_side() as decode:
        decode.expect("t", [9])
        endpoint = LinkEndpoint.decode(decode.receiver.endpoint())
        with socket.create_connection((endpoint.host, endpoint.port), timeout=WAIT_S) as sock:
            stream = Stream(sock)
            greeting = hello(LAYOUT.to_wire(), FINGERPRINT, "tcp", NUM_BLOCKS)
            greeting[1] = protocol
            stream.send(*greeting)
            assert stream.receive() == [WELCOME, protocol, []]
            stream.send(RENEW, ["t"])
            sock.sendall(newer if protocol == 1 else older)

            assert decode.listener.next() == Lost(frozenset(["t"]), ProtocolError)
            assert not any(decode.pool.block(9))
