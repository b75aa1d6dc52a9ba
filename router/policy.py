"""Where a request should run: pure, from snapshots to priced pairs. Does no I/O, reads no clock, keeps nothing.

A price is an estimate of milliseconds until the request's decode can go on: the queue before its prefill, its own
prefill, and what it meets at the decode worker. Rates are measured by the workers; one that is not known yet is taken
to be the slowest known of its role, or a low constant, so that an unknown worker is tried when the known ones are busy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")

PREFILL, DECODE = "prefill", "decode"

PRIOR_PREFILL_TOKENS_PER_S = 500.0
"""Of a small model on one CPU core; slower than any accelerator."""
PRIOR_DECODE_STEP_MS = 50.0
STREAM_SHARE = 0.05
"""How much longer one more stream makes a decode step, as a share of the step."""
TIE_MS, TIE_SHARE = 1.0, 0.05
"""Prices this close are equal: estimates are no better, and equal prompts should meet at the same worker."""
MAX_PER_ROLE = 8
"""Workers of a role that are combined into pairs, best first. Bounds the cost of a decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """A ready worker as its last report and the router's own live requests describe it."""

    worker_id: str
    role: str
    block_size: int
    num_blocks: int
    max_model_len: int
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Prompt tokens still to be computed."""
    blocks_available: int = 0
    """Free, or cached and nobody's."""
    prefill_tokens_per_s: float = 0.0
    """0: not known."""
    decode_step_ms: float = 0.0
    """0: not known."""
    in_flight: int = 0
    """Live requests of this router there."""
    in_flight_tokens: int = 0
    """Tokens of those that were sent there to be computed and are not known to be."""

    @property
    def queued_tokens(self) -> int:
        """The worker's report is up to a heartbeat old, this router's own requests are not."""
        return max(self.waiting_tokens, self.in_flight_tokens)

    @property
    def streams(self) -> int:
        return max(self.running + self.waiting, self.in_flight)

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output of the largest request that fits. The last token needs no KV."""
        return min(self.max_model_len, self.pool_tokens + 1)

    @property
    def pool_is_the_limit(self) -> bool:
        return self.pool_tokens + 1 < self.max_model_len


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    num_tokens: int
    """To be computed before the next token: prompt and the output so far."""
    max_total_tokens: int
    """Prompt and output at most."""
    key: bytes
    """Equal for prompts that begin alike; breaks ties."""
    split: bool = True
    """Whether a prefill worker may compute the prompt. If not, the decode worker does."""


@dataclass(frozen=True, slots=True)
class PriceTerm:
    name: str
    ms: float


@dataclass(frozen=True, slots=True)
class PricedPair:
    """`prefill_worker` is empty where the decode worker computes the prompt itself."""

    prefill_worker: str
    decode_worker: str
    terms: tuple[PriceTerm, ...]

    @property
    def total_ms(self) -> float:
        return sum(term.ms for term in self.terms)


@dataclass(frozen=True, slots=True)
class _Rates:
    prefill_tokens_per_s: float
    decode_step_ms: float


@dataclass(frozen=True, slots=True)
class _Offer:
    worker_id: str
    terms: tuple[PriceTerm, ...]

    @property
    def total_ms(self) -> float:
        return sum(term.ms for term in self.terms)


def price_pairs(
    workers: Sequence[WorkerSnapshot], request: PlacementRequest, exclude: Collection[str] = ()
) -> list[PricedPair]:
    """Pairs that can serve `request`, cheapest first; empty if there are none.

    Pairs of about the same price are ordered by rendezvous hash of `request.key`. Workers in `exclude` are left out.
    """
    usable = [worker for worker in workers if worker.worker_id not in exclude]
    decode = [
        worker for worker in usable if worker.role == DECODE and worker.max_request_tokens >= request.max_total_tokens
    ]
    prefill = [
        worker
        for worker in usable
        if request.split and worker.role == PREFILL and worker.max_request_tokens > request.num_tokens
    ]
    rates = {role: _assumed_rates(workers, role) for role in (PREFILL, DECODE)}
    decode_offers = _best(
        [_Offer(worker.worker_id, _decode_terms(worker, request, rates[DECODE])) for worker in decode], request.key
    )
    if not prefill:
        by_id = {worker.worker_id: worker for worker in decode}
        pairs = [
            PricedPair(
                "", offer.worker_id, _prefill_terms(by_id[offer.worker_id], request, rates[DECODE]) + offer.terms
            )
            for offer in decode_offers
        ]
    else:
        prefill_offers = _best(
            [_Offer(worker.worker_id, _prefill_terms(worker, request, rates[PREFILL])) for worker in prefill],
            request.key,
        )
        pairs = [
            PricedPair(first.worker_id, second.worker_id, first.terms + second.terms)
            for first in prefill_offers
            for second in decode_offers
        ]
    return _ordered(
        pairs, lambda pair: pair.total_ms, lambda pair: _weight(request.key, pair.prefill_worker, pair.decode_worker)
    )


def _prefill_terms(worker: WorkerSnapshot, request: PlacementRequest, assumed: _Rates) -> tuple[PriceTerm, ...]:
    per_token_ms = 1000.0 / (worker.prefill_tokens_per_s or assumed.prefill_tokens_per_s)
    return (
        PriceTerm("prefill_queue", worker.queued_tokens * per_token_ms),
        PriceTerm("prefill_compute", request.num_tokens * per_token_ms),
    )


def _decode_terms(worker: WorkerSnapshot, request: PlacementRequest, assumed: _Rates) -> tuple[PriceTerm, ...]:
    step_ms = worker.decode_step_ms or assumed.decode_step_ms
    missing = max(0, -(-request.max_total_tokens // worker.block_size) - worker.blocks_available)
    return (
        # About the time in which the running streams produce as many tokens as the missing blocks hold.
        PriceTerm("decode_blocks", missing * worker.block_size * step_ms / max(1, worker.running)),
        PriceTerm("decode_step", step_ms * (1.0 + STREAM_SHARE * worker.streams)),
    )


def _assumed_rates(workers: Sequence[WorkerSnapshot], role: str) -> _Rates:
    """For workers of `role` that have not measured theirs yet."""
    rates = [w.prefill_tokens_per_s for w in workers if w.role == role and w.prefill_tokens_per_s > 0]
    steps = [w.decode_step_ms for w in workers if w.role == role and w.decode_step_ms > 0]
    return _Rates(min(rates, default=PRIOR_PREFILL_TOKENS_PER_S), max(steps, default=PRIOR_DECODE_STEP_MS))


def _best(offers: list[_Offer], key: bytes) -> list[_Offer]:
    return _ordered(offers, lambda offer: offer.total_ms, lambda offer: _weight(key, offer.worker_id))[:MAX_PER_ROLE]


def _ordered(candidates: list[T], price: Callable[[T], float], weight: Callable[[T], bytes]) -> list[T]:
    """Cheapest first; those about as cheap as the cheapest come first of all, heaviest first."""
    if not candidates:
        return []
    priced = sorted(((price(candidate), candidate) for candidate in candidates), key=lambda entry: entry[0])
    tied = priced[0][0] * (1.0 + TIE_SHARE) + TIE_MS
    equal = sorted((candidate for ms, candidate in priced if ms <= tied), key=weight, reverse=True)
    return equal + [candidate for ms, candidate in priced if ms > tied]


def _weight(key: bytes, *worker_ids: str) -> bytes:
    """Rendezvous hash: every router gives a worker the same weight for the same prompt, without talking."""
    return blake2b(key + "\0".join(worker_ids).encode(), digest_size=16).digest()
