"""Dynamo's prefix index and selection service beside ours, in Dynamo's environment: one process, interleaved.

Arguments: our repository, workers, conversations, rounds, our folder of native libraries. Prints microseconds, one
figure a round. Answers of both sides are compared: the worker that holds a prompt must be found, to the same depth.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import msgpack
import zmq
from dynamo._core import RadixTree, SelectionService, compute_block_hash_for_seq

sys.path.insert(0, sys.argv[1])

from bench import router_index_load as load
from engine.routing_key import RoutingKeys
from router.prefix_index import PackedKeys

VISIBLE_WITHIN_S = 120.0
MODEL = "m"


class DynamoTree:
    def __init__(self) -> None:
        self.tree = RadixTree()

    def events(self, hashes: list[int], chain: list[int], first: int = 0, *, remove: bool = False) -> list[bytes]:
        """One JSON text for 32 blocks. A block goes by a hash of its own tokens, and by one of its prefix."""
        datas: list[dict[str, Any]] = []
        for i in range(first, len(hashes), load.EVENT_BLOCKS):
            ends = range(i, min(i + load.EVENT_BLOCKS, len(hashes)))
            if remove:
                datas.insert(0, {"removed": {"block_hashes": [chain[j] for j in reversed(ends)]}})
            else:
                blocks = [{"block_hash": chain[j], "tokens_hash": hashes[j]} for j in ends]
                datas.append({"stored": {"parent_hash": chain[i - 1] if i else None, "blocks": blocks}})
        return [json.dumps({"event_id": 1, "data": data, "dp_rank": 0}).encode() for data in datas]

    def feed(self, worker: int, events: list[bytes]) -> None:
        for event in events:
            self.tree.apply_event(worker, event)

    def settle(self) -> None:
        """Events are applied on a thread of the tree's own; a lookup waits for them."""
        self.tree.find_matches([1])


def chain_of(conversation: load.Conversation) -> list[int]:
    return RoutingKeys(load.SEED, b"", conversation.tokens, load.BLOCK_SIZE).all_short()


def tree_figures(ours: load.OurIndex, held: list[load.Conversation], rounds: int) -> dict[str, Any]:
    dynamo = DynamoTree()
    for conversation in held:
        hashes = compute_block_hash_for_seq(conversation.token_list(), load.BLOCK_SIZE)
        dynamo.feed(conversation.worker, dynamo.events(hashes, chain_of(conversation)))
        ours.feed(conversation.worker, ours.messages(conversation))
    dynamo.settle()
    rng = random.Random(9)
    asked = rng.sample(held, 100)
    known = [PackedKeys(chain_of(conversation)) for conversation in asked]
    lists = [conversation.token_list() for conversation in asked]
    hashed = [compute_block_hash_for_seq(tokens, load.BLOCK_SIZE) for tokens in lists]
    for conversation, tokens, hashes in zip(asked, lists, hashed, strict=True):
        theirs = {worker: depth for (worker, _), depth in dynamo.tree.find_matches(hashes).scores.items()}
        assert ours.depths(ours.matches(conversation.tokens)) == theirs, "the two indexes disagree"
        assert len(tokens) == load.PROMPT_BLOCKS * load.BLOCK_SIZE

    def each(items: Any, call: Callable[[Any], object]) -> Callable[[], int]:
        def run() -> int:
            for item in items:
                call(item)
            return len(items)

        return run

    found = load.interleaved(
        {
            "lookup_dynamo": each(hashed, lambda hashes: dynamo.tree.find_matches(hashes).scores),
            "lookup_ours": each(known, lambda keys: ours.index.lookup(keys, 0.0)),
            "decision_dynamo": each(
                lists,
                lambda tokens: dynamo.tree.find_matches(compute_block_hash_for_seq(tokens, load.BLOCK_SIZE)).scores,
            ),
            "decision_ours": each(asked, lambda conversation: ours.matches(conversation.tokens)),
        },
        rounds,
    )
    found |= event_figures(dynamo, ours, asked[:20], hashed, rounds)
    ours.check()
    return dict(found)


def event_figures(
    dynamo: DynamoTree, ours: load.OurIndex, some: list[load.Conversation], hashed: list[list[int]], rounds: int
) -> dict[str, list[float]]:
    """Blocks of these conversations leave and come back, 32 an event; the system prompts stay."""
    first = load.SYSTEM_BLOCKS
    figures: dict[str, list[float]] = {}
    count = len(some) * (load.PROMPT_BLOCKS - first)
    texts: list[tuple[int, list[list[bytes]]]] = [
        (c.worker, [dynamo.events(h, chain_of(c), first, remove=remove) for remove in (True, False)])
        for c, h in zip(some, hashed, strict=False)
    ]
    for _ in range(rounds):
        # In the order in which a worker's messages were made: all that a conversation loses, then what it gets back.
        packed = [(c.worker, [ours.messages(c, first, remove=True), ours.messages(c, first)]) for c in some]
        spent = [0.0, 0.0]
        for worker, parts in packed:
            for part, messages in enumerate(parts):
                began = time.perf_counter()
                ours.feed(worker, messages)
                spent[part] += time.perf_counter() - began
        theirs = [0.0, 0.0]
        for part in (0, 1):
            began = time.perf_counter()
            for worker, parts in texts:
                dynamo.feed(worker, parts[part])
            dynamo.settle()
            theirs[part] = time.perf_counter() - began
        for part, what in enumerate(("remove", "store")):
            figures.setdefault(f"{what}_ours", []).append(spent[part] / count * 1e6)
            figures.setdefault(f"{what}_dynamo", []).append(theirs[part] / count * 1e6)
    return figures


async def selection_figures(num_workers: int, held: list[load.Conversation], ours: load.OurIndex, rounds: int) -> Any:
    """`SelectionService` as Ray Serve embeds it: events over ZMQ in vLLM's format, one `select` a request."""
    service = SelectionService(indexer_threads=2)
    context = zmq.Context()
    try:
        publishers = []
        for worker in range(num_workers):
            publisher = context.socket(zmq.PUB)
            publisher.setsockopt(zmq.SNDHWM, 0)
            port = publisher.bind_to_random_port("tcp://127.0.0.1")
            publishers.append(publisher)
            await service.upsert_worker(
                {
                    "worker_id": worker,
                    "model_name": MODEL,
                    "endpoint": "http://127.0.0.1:1",
                    "block_size": load.BLOCK_SIZE,
                    "kv_events_endpoint": f"tcp://127.0.0.1:{port}",
                    "data_parallel_size": 1,
                    "data_parallel_start_rank": 0,
                    "max_num_batched_tokens": 8192,
                    "total_kv_blocks": 1_000_000,
                }
            )
        await asyncio.sleep(2.0)  # subscriptions have no other sign of being there
        publish(publishers, held)
        await until_visible(service, held)
        return await select_rounds(service, ours, random.Random(11).sample(held, 60), rounds)
    finally:
        service.shutdown()
        context.destroy(linger=0)


def publish(publishers: list[Any], held: list[load.Conversation]) -> None:
    sequences = [0] * len(publishers)
    for conversation in held:
        event = ["BlockStored", chain_of(conversation), None, conversation.token_list(), load.BLOCK_SIZE, None]
        batch = msgpack.packb([time.time(), [event], 0])
        number = sequences[conversation.worker].to_bytes(8, "big")
        sequences[conversation.worker] += 1
        publishers[conversation.worker].send_multipart([b"", number, batch])


async def until_visible(service: Any, held: list[load.Conversation]) -> None:
    last = {conversation.worker: conversation for conversation in held}
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    for worker, conversation in last.items():
        while True:
            overlap = await service.overlap_scores({"model_name": MODEL, "token_ids": conversation.token_list()})
            if any(w["worker_id"] == worker and w["device_blocks"] == load.PROMPT_BLOCKS for w in overlap["workers"]):
                break
            if time.monotonic() > deadline:
                raise SystemExit(f"its events were not visible within {VISIBLE_WITHIN_S:g} s")
            await asyncio.sleep(0.02)


async def select_rounds(
    service: Any, ours: load.OurIndex, asked: list[load.Conversation], rounds: int
) -> dict[str, list[float]]:
    decide = load.OurDecision(ours)
    requests = [{"model_name": MODEL, "token_ids": conversation.token_list()} for conversation in asked]
    figures: dict[str, list[float]] = {"select_dynamo": [], "select_ours": []}
    for _ in range(rounds):
        began = time.perf_counter()
        for request in requests:
            await service.select(request)
        figures["select_dynamo"].append((time.perf_counter() - began) / len(asked) * 1e6)
        began = time.perf_counter()
        for conversation in asked:
            decide.choose(conversation.tokens)
        figures["select_ours"].append((time.perf_counter() - began) / len(asked) * 1e6)
    return figures


def main() -> None:
    gc.disable()  # or whoever happens to allocate pays for the lists of both
    num_workers, count, rounds = map(int, sys.argv[2:5])
    held = load.conversations(num_workers, count)
    ours = load.OurIndex(num_workers, sys.argv[5])
    figures = tree_figures(ours, held, rounds)
    figures |= asyncio.run(selection_figures(num_workers, held, ours, rounds))
    print(json.dumps(figures | {"implementation": ours.index.implementation}))


if __name__ == "__main__":
    main()
