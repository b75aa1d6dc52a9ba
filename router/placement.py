"""Places requests: asks the index and the policy, notes what was dispatched, and learns from what came of it.

Owns the learnt rates. On the event loop; waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import xxhash

from engine.block_hash import TOKEN_BYTES
from engine.routing_key import RoutingKeys
from kvrelay.v1 import router_pb2
from router.attempt import Attempt
from router.config import RouterConfig
from router.learnt_rates import LearntRates
from router.policy import Fleet, Placement, PlacementRequest
from router.registry import Registry
from router.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Placed:
    """A decision, and the prompt that it is about."""

    placement: Placement
    keys: RoutingKeys
    num_tokens: int


class Placer:
    def __init__(self, config: RouterConfig, registry: Registry, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._registry = registry
        self._clock = clock
        self._rates = LearntRates()
        self._fleet = Fleet(self._rates)

    def place(self, request: GenerationRequest, token_ids: bytes, exclude: Collection[str]) -> Placed | None:
        """Where `request` should run, with the tokens that it has so far; None if no ready decode worker outside
        `exclude` takes it. Raises as `Registry.ignorant_of`."""
        workers = self._registry.snapshots()
        if not workers:
            return None
        seed = self._config.routing_seed
        block_size = workers[0].block_size
        keys = RoutingKeys(seed, request.scope, token_ids, block_size, request.num_public_tokens)
        num_tokens = len(token_ids) // TOKEN_BYTES
        if ignorant := self._registry.ignorant_of(request.later_fields):
            exclude = ignorant.union(exclude)
        self._fleet.refresh(workers)
        placement = self._fleet.place(
            PlacementRequest(
                num_tokens=num_tokens,
                max_total_tokens=request.max_total_tokens,
                key=xxhash.xxh3_64_intdigest(token_ids, seed),
                matches=self._registry.index.lookup(keys, self._clock()),
                max_local_tokens=self._config.local_prefill_max_tokens,
                exclude=exclude,
            )
        )
        return None if placement is None else Placed(placement, keys, num_tokens)

    def dispatched(self, placed: Placed) -> None:
        """Both workers are at it: requests that begin alike should meet there before they have told anything."""
        worker_ids = {placed.placement.prefill_worker, placed.placement.decode_worker} - {""}
        slots = [self._registry.session(worker_id).snapshot().slot for worker_id in worker_ids]
        told = [slot for slot in slots if slot is not None]
        self._registry.index.speculate_prompt(told, placed.keys, self._clock())

    def learn(self, placed: Placed, attempt: Attempt, waterfall: router_pb2.Waterfall) -> dict[str, float]:
        """Learn from an attempt that came to its end. Returns what the terms of its price came to, in milliseconds, as
        far as that is known."""
        if attempt.prefill is None:
            return self._learn_local(placed, attempt, waterfall)
        prefilled, handed_over, reserved = attempt.prefilled, attempt.handed_over, attempt.reserved
        if prefilled is None or handed_over is None or reserved is None or handed_over.recomputed_tokens:
            return {}  # it went another way than was priced
        compute_ms = prefilled.compute_us / 1000
        self._rates.prefilled(attempt.prefill.worker.worker_id, placed.num_tokens - prefilled.cached_tokens, compute_ms)
        decode = attempt.decode.worker
        moved_tokens = handed_over.blocks_received * decode.block_size
        self._rates.received(decode.worker_id, moved_tokens, handed_over.transfer_us / 1000)
        return {
            "decode_blocks": reserved.wait_us / 1000,
            "prefill_queue": prefilled.queue_us / 1000,
            "prefill_compute": compute_ms,
            **_after_first(waterfall, {"transfer": "transfer", "first_decode_step": "decode_step"}),
        }

    def _learn_local(self, placed: Placed, attempt: Attempt, waterfall: router_pb2.Waterfall) -> dict[str, float]:
        compute_ms = sum(part.duration_us for part in waterfall.parts if part.name == "decode_prefill") / 1000
        if attempt.reserved is None or not compute_ms:
            return {}
        cached = attempt.reserved.ticket.cached_tokens
        self._rates.prefilled(attempt.decode.worker.worker_id, placed.num_tokens - cached, compute_ms)
        return {
            "prefill_queue": attempt.reserved.wait_us / 1000,
            "prefill_compute": compute_ms,
            **_after_first(waterfall, {"first_decode_step": "decode_step"}),
        }


def _after_first(waterfall: router_pb2.Waterfall, terms: Mapping[str, str]) -> dict[str, float]:
    return {terms[part.name]: part.duration_us / 1000 for part in waterfall.after_first if part.name in terms}
