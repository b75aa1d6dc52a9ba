"""The closed schema: what may be encoded comes back equal, and no bytes make the decoder do anything but refuse."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_links import LAYOUT

from engine.errors import ProtocolError
from kv_transfer import frames
from kv_transfer.block_records import COPY_BYTES, LOAN_BYTES
from kv_transfer.frames import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    MAX_GROUP_BLOCKS,
    Abort,
    Ack,
    Block,
    BlockEntry,
    Blocks,
    Challenge,
    Copies,
    Finish,
    Frame,
    Hello,
    Lend,
    Meet,
    Nack,
    Proof,
    Refused,
    Renew,
    Welcome,
)

ids = st.text(min_size=1, max_size=32)
names = st.text(max_size=16)
messages = st.text(max_size=128)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
hashes = st.binary(min_size=32, max_size=32)
features = st.lists(names, max_size=4).map(tuple)

hellos = st.builds(
    Hello,
    protocol=u32,
    oldest_protocol=u32,
    worker_id=ids,
    incarnation=ids,
    target_worker_id=ids,
    target_incarnation=ids,
    fingerprint=hashes,
    layout=st.just(LAYOUT.to_wire()),
    transport=names,
    num_blocks=u64,
    capabilities=features,
)
blocks = st.builds(
    Block,
    ticket_id=ids,
    incarnation=ids,
    ordinal=u32,
    slot=u32,
    generation=u64,
    hash=hashes,
    digest=st.binary(min_size=16, max_size=16),
    offset=st.none() | u64,
    length=u32,
)
groups = st.builds(
    Blocks,
    ticket_id=ids,
    incarnation=ids,
    entries=st.lists(
        st.tuples(u32, u32, u64, hashes, st.binary(min_size=16, max_size=16), st.none() | u64).map(BlockEntry._make),
        min_size=1,
        max_size=4,
    ).map(tuple),
    length=u32,
)
digests = st.binary(min_size=16, max_size=16)


def record(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size).map(lambda one: 2 * one)


any_frame: st.SearchStrategy[Frame] = st.one_of(
    hellos,
    st.builds(Welcome, protocol=u32, capabilities=features),
    st.builds(Refused, code=names, message=messages),
    blocks,
    groups,
    st.builds(Finish, ticket_id=ids, count=u32),
    st.builds(Renew, ticket_ids=st.lists(ids, max_size=8).map(tuple)),
    st.builds(Abort, ticket_id=ids),
    st.builds(Ack, ticket_id=ids, ordinals=st.lists(u32, max_size=8).map(tuple)),
    st.builds(Nack, ticket_id=ids, ordinal=st.none() | u32, error=names, message=messages),
    st.builds(Meet, key=messages, value=st.binary(max_size=512)),
    st.builds(Challenge, protocol=u32, nonce=hashes),
    st.builds(Proof, nonce=hashes, mac=hashes),
    st.builds(Lend, ticket_id=ids, incarnation=ids, records=record(LOAN_BYTES), digest=digests),
    st.builds(Copies, ticket_id=ids, incarnation=ids, records=record(COPY_BYTES), length=u32),
)


@settings(deadline=None)
@given(any_frame)
def test_every_frame_comes_back_equal(frame: Frame) -> None:
    encoded = frames.encode(frame)

    assert frames.body_length(encoded[:LENGTH_BYTES]) == len(encoded) - LENGTH_BYTES
    assert frames.decode(encoded[LENGTH_BYTES:]) == frame


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_frame(body: bytes) -> None:
    try:
        frame = frames.decode(body)
    except ProtocolError:
        return
    assert frames.decode(frames.encode(frame)[LENGTH_BYTES:]) == frame


@settings(max_examples=200, deadline=None)
@given(any_frame, st.data())
def test_damaged_frames_are_refused_or_keep_to_the_schema(frame: Frame, data: st.DataObject) -> None:
    body = bytearray(frames.encode(frame)[LENGTH_BYTES:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]

    try:
        decoded = frames.decode(body)
    except ProtocolError:
        return
    assert frames.decode(frames.encode(decoded)[LENGTH_BYTES:]) == decoded


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | u64
    | st.integers(-(2**63), -1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.binary(max_size=4), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.integers(-1, 15), st.lists(msgpack_values, max_size=12))
def test_fields_of_other_types_are_refused(kind: int, values: list[object]) -> None:
    try:
        decoded = frames.decode(msgpack.packb([kind, *values]))
    except ProtocolError:
        return
    assert frames.decode(frames.encode(decoded)[LENGTH_BYTES:]) == decoded


@pytest.mark.parametrize("length", [0, MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1])
def test_a_length_that_no_frame_has_is_refused_before_it_is_waited_for(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        frames.body_length(length.to_bytes(LENGTH_BYTES, "little"))


@pytest.mark.parametrize(
    "claim",
    [
        b"\xdd\xff\xff\xff\xff",  # a list of 4 Gi items
        b"\xdf\xff\xff\xff\xff",  # a map
        b"\xc6\xff\xff\xff\xff",  # bytes
        b"\xdb\xff\xff\xff\xff",  # text
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x91" * 5000,  # nested lists
    ],
)
def test_a_claimed_size_is_refused_before_it_is_allocated(claim: bytes) -> None:
    with pytest.raises(ProtocolError):
        frames.decode(claim)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ProtocolError, match="kind 99 is unknown"):
        frames.decode(msgpack.packb([99, "t"]))


def test_one_field_too_many_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Abort has 2 fields, expected 1"):
        frames.decode(msgpack.packb([7, "t", 1]))


def test_a_field_out_of_range_is_named_with_its_rule() -> None:
    with pytest.raises(ProtocolError, match=r"Finish.count must be an integer in \[0, 2\^32\)"):
        frames.decode(msgpack.packb([5, "t", -1]))


def test_what_breaks_the_schema_is_not_encoded() -> None:
    with pytest.raises(ProtocolError, match=r"Abort\.ticket_id must be text of at most 128 bytes"):
        frames.encode(Abort(ticket_id="x" * 129))
    with pytest.raises(ProtocolError, match="surrogates"):
        frames.encode(Abort(ticket_id="\ud800"))


def test_a_long_message_is_clipped_to_what_a_frame_may_hold() -> None:
    clipped = frames.clipped("é" * 1000)

    assert frames.decode(frames.encode(Refused(code="x", message=clipped))[LENGTH_BYTES:]) == Refused(
        code="x", message="é" * 256
    )


ENTRY = BlockEntry(2**32 - 1, 2**32 - 1, 2**64 - 1, bytes(32), bytes(16), 2**64 - 1)
LARGEST = Blocks(ticket_id="t" * 128, incarnation="i" * 128, entries=(ENTRY,) * MAX_GROUP_BLOCKS, length=2**32 - 1)


def test_the_largest_group_fits_into_a_frame() -> None:
    encoded = frames.encode(LARGEST)

    assert frames.body_length(encoded[:LENGTH_BYTES]) <= MAX_FRAME_BYTES
    assert frames.decode(encoded[LENGTH_BYTES:]) == LARGEST


@pytest.mark.parametrize("count", [0, MAX_GROUP_BLOCKS + 1])
def test_a_group_of_too_few_or_too_many_blocks_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=r"Blocks\.entries must be a list of 1 to 128 blocks"):
        frames.encode(replace(LARGEST, entries=(ENTRY,) * count))


def test_a_block_and_a_group_of_one_say_the_same() -> None:
    group = replace(LARGEST, entries=(ENTRY,))

    assert [block.grouped() for block in group.singly()] == [group]
