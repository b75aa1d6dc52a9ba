"""What must hold: of a worker after each of its steps, and of all when the world has come to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from decode_worker.stream import Phase
from decode_worker.worker import DecodeWorker
from engine.block_hash import BlockIdentity, block_chain, pack_tokens
from engine.borrowing import BorrowingBlockManager
from explorer.model import BLOCK_SIZE, LAYOUT, expected_block
from kv_transfer.frames import BlockEntry

if TYPE_CHECKING:
    from explorer.node import Node
    from explorer.world import World


IDENTITY = BlockIdentity(model_fingerprint=bytes(32), kv_dtype=LAYOUT.dtype, block_size=BLOCK_SIZE)


class Violation(Exception):
    """An invariant does not hold."""


def check_node(node: Node, *, engine: bool) -> None:
    """After each step of `node`, or of a link of it. `engine`: it was the engine's, which nobody else changes."""
    if engine:
        node.engine.check_integrity()
    core = node.role._core
    for record in core.live:
        _require(record.deadline in node.agenda.timers or record.stopping, f"{record.key} has no deadline")
    if node.decodes:
        _check_decode(node)
    else:
        _check_prefill(node)


def _check_decode(node: Node) -> None:
    assert isinstance(node.role, DecodeWorker)
    node.table.check_integrity()
    expiry, timer = node.table.next_expiry(), node.role._lease_timer
    _require(
        expiry is None or (timer in node.agenda.timers and timer.when <= max(expiry, node.agenda.now())),
        "a ticket is open without an armed timer",
    )
    for record in node.role._core.live:
        open_here = record.phase is Phase.OPEN
        _require(open_here == (node.table.progress(record.key) is not None), f"{record.key} waits without a ticket")
    if isinstance(node.blocks, BorrowingBlockManager):
        _check_borrowed(node, node.blocks)
    for slot, generation in node.being_written():
        _require(
            node.blocks.generation(slot) == generation and node.blocks.references(slot) > 0,
            f"slot {slot} was given away while a link writes into it",
        )


def _check_borrowed(node: Node, blocks: BorrowingBlockManager) -> None:
    """Whoever compares the generations knows which blocks still hold what they were lent for."""
    for block, borrowed in blocks._borrowed.items():
        if borrowed.hash is not None and borrowed.lender.generations[borrowed.source] == borrowed.generation:
            _check_words(node, block, node.world.contents[borrowed.hash])


def _check_prefill(node: Node) -> None:
    if not any(link.transfers.has_outcomes() for link in node.sender._threads):
        node.sender.check_integrity()
    for key, block, generation in node.sender.reading():
        _require(
            node.blocks.generation(block) == generation and node.blocks.references(block) > 0,
            f"block {block} was given away while a link reads it for {key}",
        )


def check_adopted(node: Node, entry: BlockEntry) -> None:
    """It has just been adopted."""
    tokens = node.world.contents.get(entry.hash)
    _require(tokens is not None, f"block {entry.ordinal} was adopted under a hash that nobody asked for")
    _check_words(node, entry.slot, tokens or ())


def check_rest(world: World) -> None:
    """Nothing happens any more, or not for too long: all requests have ended, and nothing of them is left."""
    waiting = [client.actor.name for client in world.clients if not client.outcome]
    _require(not waiting or world.silent, f"deadlock: {waiting} wait, and nothing happens")
    for node in world.nodes:
        if node.alive:
            _check_idle(node)
    for connection in world.connections.values():
        connection.router_end.check_integrity()
        _require(world.silent or not connection.router_end.in_flight, "a lane is left at the router")


def _check_idle(node: Node) -> None:
    left = [record.key for record in node.role._core.live]
    _require(not left, f"{node.worker_id} still has {left}")
    stats = node.engine.stats()
    counts = (stats.running, stats.waiting, stats.awaiting_kv, stats.held)
    _require(not any(counts), f"requests are left in the engine of {node.worker_id}: {counts}")
    blocks = stats.blocks
    _require(blocks.free + blocks.cached == blocks.total, f"blocks of {node.worker_id} are left: {blocks}")
    _require(not blocks.borrowed and not blocks.lent, f"{node.worker_id} lends or borrows still: {blocks}")
    if node.decodes:
        table = node.table.stats()
        _require(table.open == table.ending == 0, f"tickets of {node.worker_id} are left: {table}")
    else:
        node.role._computer.check_idle()  # type: ignore[union-attr]
        _require(not node.sender._requests, f"transfers of {node.worker_id} are left")
    for content_hash, tokens in node.world.contents.items():
        for block in node.blocks.lookup([content_hash]):
            _check_words(node, block, tokens)


def contents_of(prompt: list[int], output: list[int]) -> dict[bytes, tuple[int, ...]]:
    """Content hash -> tokens up to the end of the block, for every block that a hand-over of these tokens may name."""
    contents = {}
    for length in range(len(prompt), len(prompt) + len(output) + 1):
        tokens = [*prompt, *output][:length]
        chain = block_chain(IDENTITY.root(b""), pack_tokens(tokens), BLOCK_SIZE)
        contents.update({h: tuple(tokens[: (i + 1) * BLOCK_SIZE]) for i, h in enumerate(chain)})
    return contents


def _check_words(node: Node, block: int, tokens: tuple[int, ...]) -> None:
    words = node.kv.block(block).cast("I")
    wrong = [offset for offset, word in expected_block(tokens) if words[offset] != word]
    _require(not wrong, f"block {block} of {node.worker_id} does not hold the KV of {tokens}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)
