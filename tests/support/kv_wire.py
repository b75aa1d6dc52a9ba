"""A sender and a receiver of KV blocks with a proxy between them, as the conformance tests use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from kv_links import (
    FINGERPRINT,
    LAYOUT,
    NUM_BLOCKS,
    SETTINGS,
    DecodeSide,
    FaultProxy,
    MemoryPool,
    Pieces,
    PrefillSide,
    decode_side,
    fault_proxy,
    in_time,
    only,
    outgoing,
    prefill_side,
    same_bytes,
    ticket,
)

from kv_transfer.frames import Blocks, Frame, Hello, encode
from kv_transfer.link import LinkSettings

HELLO = Hello(
    protocol=2,
    oldest_protocol=1,
    worker_id="prefill-0",
    incarnation="1",
    target_worker_id="decode-0",
    target_incarnation="1",
    fingerprint=FINGERPRINT,
    layout=LAYOUT.to_wire(),
    transport="tcp",
    num_blocks=NUM_BLOCKS,
    capabilities=(),
)
"""As a sender says it that has nothing optional."""


def with_entry(frame: Blocks, at: int = 0, **fields: Any) -> Blocks:
    """`frame` with other fields in one of its blocks."""
    entries = list(frame.entries)
    entries[at] = entries[at]._replace(**fields)
    return replace(frame, entries=tuple(entries))


@dataclass
class Wire:
    """A sender and a receiver over one transport; `proxy` is in between for those who connect to its endpoint."""

    transport: str
    prefill: PrefillSide
    decode: DecodeSide
    proxy: FaultProxy

    def begin(self, ticket_id: str, slots: Sequence[int], *, generation: int = 1, direct: bool = False) -> None:
        """A ticket for blocks 0, 1, ... in `slots`, and its transfer, request `ticket_id`."""
        expected = self.decode.expect(ticket_id, slots, generation)
        endpoint = only(self.decode.receiver.endpoint(), self.transport) if direct else self.proxy.endpoint
        self.prefill.sender.open(ticket_id, ticket(ticket_id, endpoint, expected, generation), in_time())

    def send(self, ticket_id: str, ordinals: Sequence[int], first_source: int = 0) -> None:
        self.prefill.sender.send(ticket_id, outgoing(ordinals, first_source))

    def arrived(self, slots: Sequence[int], first_source: int = 0) -> bool:
        return all(
            same_bytes(self.prefill.pool, first_source + ordinal, self.decode.pool, slot)
            for ordinal, slot in enumerate(slots)
        )

    def change_blocks(self, change: Callable[[Blocks], Blocks]) -> None:
        """Forge the frames of blocks on their way."""

        def hook(frame: Frame, encoded: bytes, payload: bytes) -> Pieces:
            if isinstance(frame, Blocks):
                return [encode(change(frame)) + payload]
            return [encoded + payload]

        self.proxy.to_receiver = hook

    def untouched(self, slot: int) -> bool:
        return not any(self.decode.pool.block(slot))


@contextmanager
def open_wire(
    transport: str,
    prefill_settings: LinkSettings = SETTINGS,
    decode_settings: LinkSettings = SETTINGS,
    source: MemoryPool | None = None,
) -> Iterator[Wire]:
    with decode_side(decode_settings) as decode, prefill_side(prefill_settings, source) as prefill:
        with fault_proxy(decode.receiver.endpoint(), transport) as proxy:
            yield Wire(transport, prefill, decode, proxy)
