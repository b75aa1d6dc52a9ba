"""The frames of a link: a closed schema over msgpack. Knows no socket, and nothing of what a frame leads to.

On the wire: length (u32 LE) || msgpack array [kind, field, ...], fields in the order of the dataclass. After a
`Block` or `Blocks` follow `length` raw bytes for each block without `offset`, back to back. HELLO, WELCOME and REFUSED
keep their fields for ever, so that two versions can always tell each other why they cannot talk; everything else
belongs to the version that was agreed on. Version 1 has `Block`, a frame for each; version 2 has `Blocks` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack

from engine.block_hash import HASH_BYTES
from engine.errors import ProtocolError
from kv_transfer.block_records import COPY_BYTES, LOAN_BYTES
from kv_transfer.digest import DIGEST_BYTES
from kv_transfer.frame_fields import (
    Check,
    Invalid,
    blob,
    bytes_up_to,
    flat_map,
    number,
    optional,
    records,
    text,
    tuple_of,
)
from kv_transfer.identity import FINGERPRINT_BYTES, MAX_ID_BYTES

PROTOCOL_VERSION = 2
OLDEST_PROTOCOL_VERSION = 1
"""That this version still speaks: N-1."""
GROUPS_PROTOCOL_VERSION = 2
"""The first one with `Blocks`."""

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 * 1024
"""Of the msgpack part. A longer claim ends the connection before anything is allocated for it."""
MAX_GROUP_BLOCKS = 128
"""Of one `Blocks` frame. They fit into a frame, their answer too."""
MAX_GROUP_BYTES = 64 * 1024 * 1024
"""Payload of one `Blocks` frame; a single larger block is allowed."""
MAX_LENT_BLOCKS = 256
"""Of one `Lend` frame."""
MAX_RENEWED_TICKETS = 64
MAX_RELEASED_TICKETS = 64
MAX_ACKED_ORDINALS = 256
MAX_MESSAGE_BYTES = 512
NONCE_BYTES = MAC_BYTES = 32
CONVERTS = "converts"
"""Capability of P: if D's layout is another one, P makes blocks of it, for transports where payloads follow frames."""
CARD = "card:"
"""Capability of P, and behind it the GPU that its pool is on: NCCL connects no two ends on one card."""
COLUMNS = "columns"
"""Capability of D: it takes `Copies`."""
_MAX_CAPABILITIES = 16
_MAX_NAME_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """P to D, first."""

    protocol: int
    """Newest that P speaks."""
    oldest_protocol: int
    worker_id: str
    incarnation: str
    target_worker_id: str
    """Whom P wants: an address may since belong to somebody else."""
    target_incarnation: str
    fingerprint: bytes
    layout: dict[str, Any]
    transport: str
    num_blocks: int
    """In P's pool."""
    capabilities: tuple[str, ...]
    """Optional features; unknown ones are ignored. `CONVERTS` is one, `authentication.CAPABILITY` another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    protocol: int
    """Agreed on."""
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    code: str
    """One of `kv_transfer.handshake.RefusalCode`."""
    message: str


class BlockEntry(NamedTuple):
    """One block of a group."""

    ordinal: int
    slot: int
    generation: int
    hash: bytes
    digest: bytes
    offset: int | None
    """Of the block in P's pool; None if the payload follows the frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """P to D, since version 2: these blocks of one ticket are complete, and here they are."""

    ticket_id: str
    incarnation: str
    """Of D, as the ticket says."""
    entries: tuple[BlockEntry, ...]
    length: int
    """Of each payload, bytes."""

    def singly(self) -> tuple[Block, ...]:
        """The same in version 1, a frame for each block."""
        return tuple(
            Block(ticket_id=self.ticket_id, incarnation=self.incarnation, length=self.length, **entry._asdict())
            for entry in self.entries
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """P to D, version 1: one block is complete, and here it is."""

    ticket_id: str
    incarnation: str
    ordinal: int
    slot: int
    generation: int
    hash: bytes
    digest: bytes
    offset: int | None
    """Of the block in P's pool; None if the payload follows this frame."""
    length: int
    """Of the payload, bytes."""

    def grouped(self) -> Blocks:
        """The same in version 2."""
        entry = BlockEntry(self.ordinal, self.slot, self.generation, self.hash, self.digest, self.offset)
        return Blocks(ticket_id=self.ticket_id, incarnation=self.incarnation, entries=(entry,), length=self.length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """P to D: all `count` blocks of the ticket were sent."""

    ticket_id: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """P to D: these tickets are still wanted. Also the first that D hears of a ticket on this link."""

    ticket_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """P to D: no more blocks of this ticket will come."""

    ticket_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """D to P: these blocks are adopted."""

    ticket_id: str
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """D to P: a block was refused, or (without `ordinal`) the whole ticket."""

    ticket_id: str
    ordinal: int | None
    error: str
    """Class name of a `TransferError`."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meet:
    """Both ways, before the first block: what torch's process groups have to tell each other."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """D to P, in answer to HELLO: prove that you know the cluster key."""

    protocol: int
    """That `Welcome` will say."""
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Both ways, P first. See `kv_transfer.authentication`."""

    nonce: bytes
    """Of its author."""
    mac: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """P to D, on links of `adopt`: these blocks of one ticket are complete, and D may read them in P's pool."""

    ticket_id: str
    incarnation: str
    records: bytes
    """Of `kv_transfer.block_records.LOAN`."""
    digest: bytes
    """Of the records: nothing else would tell that another block was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLoans:
    """P to D, while blocks are lent: do you still have them?"""

    number: int
    """At least 1, counting up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """D to P: of these tickets so many blocks are not read any more."""

    number: int
    """Of the newest `AskLoans` that came: whoever answers lives."""
    ticket_ids: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """P to D, where both share memory and D says `COLUMNS`: as `Blocks`, of many blocks that are full."""

    ticket_id: str
    incarnation: str
    records: bytes
    """Of `kv_transfer.block_records.COPY`."""
    length: int


Frame = (
    Hello
    | Welcome
    | Refused
    | Block
    | Finish
    | Renew
    | Abort
    | Ack
    | Nack
    | Blocks
    | Meet
    | Challenge
    | Proof
    | Lend
    | AskLoans
    | Release
    | Copies
)


def clipped(message: str) -> str:
    """`message`, cut to what `Refused.message` and `Nack.message` may hold."""
    return message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")


def _entries(value: Any) -> Any:
    if type(value) not in (tuple, list) or not 0 < len(value) <= MAX_GROUP_BLOCKS:
        raise Invalid(f"a list of 1 to {MAX_GROUP_BLOCKS} blocks")
    return tuple(_entry(item) for item in value)


def _entry(value: Any) -> BlockEntry:
    if not isinstance(value, (tuple, list)) or len(value) != len(_ENTRY_CHECKS):
        raise Invalid(f"a list of blocks with {len(_ENTRY_CHECKS)} fields each")
    ordinal, slot, generation, content_hash, digest, offset = value
    if not (
        type(ordinal) is type(slot) is type(generation) is int
        and type(content_hash) is type(digest) is bytes
        and 0 <= ordinal < _LIMIT_32
        and 0 <= slot < _LIMIT_32
        and 0 <= generation < _LIMIT_64
        and len(content_hash) == HASH_BYTES
        and len(digest) == DIGEST_BYTES
        and (offset is None or (type(offset) is int and 0 <= offset < _LIMIT_64))
    ):
        # All at once, as there is one for each block; now one by one, for the rule that is broken.
        for check, item in zip(_ENTRY_CHECKS, value, strict=True):
            check(item)
    return value if type(value) is BlockEntry else BlockEntry(ordinal, slot, generation, content_hash, digest, offset)


_LIMIT_32, _LIMIT_64, _U32, _U64 = 1 << 32, 1 << 64, number(32), number(64)
_ID, _NAME = text(MAX_ID_BYTES), text(_MAX_NAME_BYTES)
_MESSAGE = text(MAX_MESSAGE_BYTES)
_FEATURES = tuple_of(_NAME, _MAX_CAPABILITIES)
_HASH = blob(HASH_BYTES)
_ENTRY_CHECKS: tuple[Check, ...] = (_U32, _U32, _U64, _HASH, blob(DIGEST_BYTES), optional(_U64))

_CHECKS: dict[type[Frame], tuple[Check, ...]] = {
    Hello: (_U32, _U32, _ID, _ID, _ID, _ID, blob(FINGERPRINT_BYTES), flat_map, _NAME, _U64, _FEATURES),
    Welcome: (_U32, _FEATURES),
    Refused: (_NAME, _MESSAGE),
    Block: (_ID, _ID, _U32, _U32, _U64, _HASH, blob(DIGEST_BYTES), optional(_U64), _U32),
    Finish: (_ID, _U32),
    Renew: (tuple_of(_ID, MAX_RENEWED_TICKETS),),
    Abort: (_ID,),
    Ack: (_ID, tuple_of(_U32, MAX_ACKED_ORDINALS)),
    Nack: (_ID, optional(_U32), _NAME, _MESSAGE),
    Blocks: (_ID, _ID, _entries, _U32),
    Meet: (text(MAX_MESSAGE_BYTES), bytes_up_to(MAX_MESSAGE_BYTES)),
    Challenge: (_U32, blob(NONCE_BYTES)),
    Proof: (blob(NONCE_BYTES), blob(MAC_BYTES)),
    Lend: (_ID, _ID, records(LOAN_BYTES, MAX_LENT_BLOCKS), blob(DIGEST_BYTES)),
    AskLoans: (_U32,),
    Release: (_U32, tuple_of(_ID, MAX_RELEASED_TICKETS), tuple_of(_U32, MAX_RELEASED_TICKETS)),
    Copies: (_ID, _ID, records(COPY_BYTES, MAX_GROUP_BLOCKS), _U32),
}
"""A rule for each field, in the order of the fields. The order of the classes is their number on the wire, from 1."""

_CLASSES = list(_CHECKS)
_KINDS = {cls: number for number, cls in enumerate(_CLASSES, start=1)}
_NAMES = {cls: tuple(field.name for field in fields(cls)) for cls in _CLASSES}
_VALUES: dict[type[Frame], Callable[[Frame], Any]] = {cls: attrgetter(*names) for cls, names in _NAMES.items()}


def encode(frame: Frame) -> bytes:
    """Length and msgpack part. Raises `ProtocolError` if a field breaks the schema."""
    cls = type(frame)
    values = _VALUES[cls](frame)
    checked = _checked(cls, values if len(_NAMES[cls]) > 1 else (values,))
    body: bytes = msgpack.packb([_KINDS[cls], *checked])
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def body_length(prefix: bytes | bytearray | memoryview) -> int:
    """What the 4 bytes before a frame claim. Raises `ProtocolError` if no frame is that long."""
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is announced, allowed are 1 to {MAX_FRAME_BYTES}")
    return length


def decode(body: bytes | bytearray | memoryview) -> Frame:
    """A frame from its msgpack part. Whatever the bytes are, the only error is `ProtocolError`."""
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame has {len(body)} bytes, allowed are {MAX_FRAME_BYTES}")
    try:
        items = msgpack.unpackb(
            body,
            max_str_len=MAX_MESSAGE_BYTES,
            max_bin_len=MAX_LENT_BLOCKS * LOAN_BYTES,
            max_array_len=MAX_ACKED_ORDINALS,
            max_map_len=16,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a frame is no msgpack within the limits: {error}") from error
    if type(items) is not list or not items or type(items[0]) is not int:
        raise ProtocolError("a frame must be a list that begins with its kind")
    kind = items.pop(0)
    if not 0 < kind <= len(_CLASSES):
        raise ProtocolError(f"frame kind {kind} is unknown")
    cls = _CLASSES[kind - 1]
    frame: Frame = cls(**dict(zip(_NAMES[cls], _checked(cls, items), strict=True)))
    return frame


def _checked(cls: type[Frame], values: tuple[Any, ...] | list[Any]) -> list[Any]:
    checks = _CHECKS[cls]
    if len(values) != len(checks):
        raise ProtocolError(f"{cls.__name__} has {len(values)} fields, expected {len(checks)}")
    checked: list[Any] = []
    try:
        for check, value in zip(checks, values, strict=True):
            checked.append(check(value))
    except Invalid as error:
        raise ProtocolError(f"{cls.__name__}.{_NAMES[cls][len(checked)]} must be {error}") from None
    return checked
