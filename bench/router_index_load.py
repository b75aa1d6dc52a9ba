"""A million blocks at 64 workers, prompts that begin with them, and our router's index at work on both.

Imports neither peers nor torch, so that it also runs in a peer's environment.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.routing_key import RoutingKeys
from kvrelay.v1 import worker_pb2
from router.block_follower import BlockFollower, FollowerState
from router.learnt_rates import LearntRates
from router.native.index import make_index
from router.policy import Fleet, PlacementRequest
from router.prefix_index import Match
from router.snapshot import DECODE, WorkerSnapshot

BLOCK_SIZE = 16
PROMPT_BLOCKS = 512
SYSTEM_BLOCKS = 128
NUM_SYSTEMS = 64
EVENT_BLOCKS = 32
SEED = 7
INDEX_BYTES = 1 << 30
SPECULATION_S = 10.0
_BLOCK_BYTES = 4 * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of 512 blocks, 128 of them a system prompt that others begin with too; resident at one worker."""

    worker: int
    tokens: bytes

    def token_list(self) -> list[int]:
        return array("I", self.tokens).tolist()

    def cut(self, num_blocks: int, rng: random.Random) -> Conversation:
        """As long, with new tokens after the first `num_blocks` blocks."""
        kept = self.tokens[: num_blocks * _BLOCK_BYTES]
        return Conversation(self.worker, kept + rng.randbytes(len(self.tokens) - len(kept)))


def conversations(num_workers: int, count: int, seed: int = 5) -> list[Conversation]:
    rng = random.Random(seed)
    systems = [rng.randbytes(SYSTEM_BLOCKS * _BLOCK_BYTES) for _ in range(NUM_SYSTEMS)]
    own = (PROMPT_BLOCKS - SYSTEM_BLOCKS) * _BLOCK_BYTES
    return [Conversation(rng.randrange(num_workers), rng.choice(systems) + rng.randbytes(own)) for _ in range(count)]


class OurIndex:
    """The index with a follower for each worker, fed with serialized messages as sessions bring them."""

    def __init__(self, num_workers: int, native_cache: str = "") -> None:
        """As a router with this `native_cache` would make it."""
        self.index = make_index(INDEX_BYTES, SPECULATION_S, native_cache)
        self.followers = [BlockFollower(self.index, lambda _: None, 0.0) for _ in range(num_workers)]
        self._sequences = [1] * num_workers
        self._digests = [0] * num_workers
        self._systems: list[set[int]] = [set() for _ in range(num_workers)]
        """Keys of system prompts that were told; other blocks are told once."""
        for follower in self.followers:
            follower.apply(worker_pb2.BlockChanges(sequence=1, list=1, begins=True, complete=True), 0.0)

    def messages(self, conversation: Conversation, first_block: int = 0, *, remove: bool = False) -> list[bytes]:
        """That tell of its blocks from `first_block` on. To be fed in the order in which they were made."""
        worker = conversation.worker
        keys = RoutingKeys(SEED, b"", conversation.tokens, BLOCK_SIZE).all_short()
        known = self._systems[worker]
        new = [key for i, key in enumerate(keys) if i >= first_block and (i >= SYSTEM_BLOCKS or key not in known)]
        known.update(keys[first_block:SYSTEM_BLOCKS])
        if remove:
            new.reverse()
        pieces = [new[i : i + EVENT_BLOCKS] for i in range(0, len(new), EVENT_BLOCKS)]
        return [self._message(worker, piece, remove) for piece in pieces]

    def feed(self, worker: int, messages: Sequence[bytes]) -> None:
        follower, parse = self.followers[worker], worker_pb2.BlockChanges.FromString
        for message in messages:
            follower.apply(parse(message), 0.0)

    def matches(self, tokens: bytes) -> list[Match]:
        return self.index.lookup(RoutingKeys(SEED, b"", tokens, BLOCK_SIZE), 0.0)

    def depths(self, matches: Sequence[Match]) -> dict[int, int]:
        """Worker -> blocks."""
        by_slot = {follower.slot: worker for worker, follower in enumerate(self.followers)}
        return {
            worker: match.num_blocks for match in matches for slot, worker in by_slot.items() if match.slots >> slot & 1
        }

    def check(self) -> None:
        """Every digest agreed with what is noted."""
        assert all(follower.state is FollowerState.LIVE for follower in self.followers), "a follower saw a difference"

    def _message(self, worker: int, keys: Sequence[int], remove: bool) -> bytes:
        self._sequences[worker] += 1
        change = -sum(keys) if remove else sum(keys)
        self._digests[worker] = (self._digests[worker] + change) % (1 << 64)
        packed = array("Q", keys).tobytes()
        return worker_pb2.BlockChanges(
            sequence=self._sequences[worker],
            digest=self._digests[worker],
            removed=packed if remove else b"",
            stored=b"" if remove else packed,
        ).SerializeToString()


class OurDecision:
    """The whole of a decision: prompt in, worker out, with the load of the chosen one changed each time."""

    def __init__(self, ours: OurIndex) -> None:
        self._ours = ours
        self._fleet = Fleet(LearntRates())
        self._workers = {
            f"w{number}": WorkerSnapshot(
                worker_id=f"w{number}",
                role=DECODE,
                block_size=BLOCK_SIZE,
                num_blocks=1_000_000,
                max_model_len=1_000_000,
                blocks_available=1_000_000,
                prefill_tokens_per_s=10_000.0,
                decode_step_ms=10.0,
                waiting_tokens=100 * (number % 7),
                slot=follower.slot,
            )
            for number, follower in enumerate(ours.followers)
        }

    def choose(self, tokens: bytes) -> str:
        self._fleet.refresh(list(self._workers.values()))
        placement = self._fleet.place(
            PlacementRequest(
                num_tokens=len(tokens) // 4,
                max_total_tokens=len(tokens) // 4 + 100,
                key=int.from_bytes(tokens[-8:], "little"),
                matches=self._ours.matches(tokens),
            )
        )
        assert placement is not None
        chosen = self._workers[placement.decode_worker]
        self._workers[placement.decode_worker] = chosen._replace(waiting_tokens=(chosen.waiting_tokens + 100) % 700)
        return placement.decode_worker


def interleaved(candidates: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, list[float]]:
    """Microseconds an item of each, one figure a round; each call returns how many items it did."""
    figures: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            count = run()
            figures[name].append((time.perf_counter() - began) / count * 1e6)
    return figures
