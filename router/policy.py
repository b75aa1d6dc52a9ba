"""Where a request should run: pure, from snapshots to priced pairs. Does no I/O and reads no clock.

A price is an estimate of milliseconds: until the request's decode can go on (its turn, its prefill, the KV on its way,
the wait for blocks, its first decode step), and what it costs the streams that run at the decode worker meanwhile.
`costs` says where the rates come from.

The chosen pair need not be the cheapest. One that holds more of the prompt may cost more, by a multiple of what is
saved by holding it (`AFFINITY`), because whoever computes a prefix again also keeps it again, in place of something
else. That is a bound on the regret of each request: no worker is too hot for the others' affinity.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import NamedTuple

from router.candidates import Candidates, tied
from router.costs import AssumedRates, WorkerCosts, assumed_rates, worker_costs
from router.learnt_rates import LearntRates
from router.prefix_index import Match
from router.snapshot import DECODE, PREFILL, ROLES, WorkerSnapshot

HANDOVER_MS = 1.0
"""Of the last block, once it is computed, and of the messages about it. What a prompt without a transfer saves."""
AFFINITY = 6.0
"""Times what a cached prefix saves, how much more its holder may cost than another. Lower: bursts make copies, and each
copy is work that later requests wait for; `bench.replay` has the figures. From 4 on they change little."""
MAX_CHANGES, CHANGES_PER_WORKER = 64, 4
"""After so many changed snapshots all costs are worked out anew, with them the rates assumed for unknown workers and
what a cached token is worth."""
MAX_PER_ROLE = 8
"""Workers of a role that are combined into pairs, best first. Bounds the cost of a decision."""
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class PlacementRequest(NamedTuple):
    """By name only."""

    num_tokens: int
    """To be computed before the next token: prompt and the output so far."""
    max_total_tokens: int
    """Prompt and output at most."""
    key: int
    """Equal for equal prompts; below 2^64. Breaks ties."""
    matches: Sequence[Match] = ()
    """Who is believed to hold how many blocks of the tokens."""
    max_local_tokens: int = 0
    """A decode worker may compute so many tokens itself; more only if no prefill worker can."""
    exclude: Collection[str] = ()
    """Workers that are not asked."""


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
    affinity_ms: float = 0.0
    """How much more it may cost than a pair that holds nothing of the prompt."""
    cached_tokens: int = 0
    """That the worker which computes the prompt is believed to hold."""

    @property
    def total_ms(self) -> float:
        return sum(term.ms for term in self.terms)


class Fleet:
    """The ready workers, with prices that are worked out when a worker's snapshot changes."""

    def __init__(self, rates: LearntRates) -> None:
        self._rates = rates
        self._known: dict[str, WorkerSnapshot] = {}
        self._last: Sequence[WorkerSnapshot] = ()
        """As they were given."""
        self._assumed: Mapping[str, AssumedRates] = {}
        self._num_changes = 0
        """Since the assumed rates were worked out."""
        self._prefill, self._decode, self._local = _uses(())
        self._uses: Mapping[str, Sequence[Candidates]] = {}
        """By role: what its workers are priced for."""
        self._least_prefill_tokens = self._least_decode_tokens = 0

    def refresh(self, workers: Sequence[WorkerSnapshot]) -> None:
        """Take the workers as they are now. One whose snapshot is the object of last time costs next to nothing; the
        rates of the others are looked up."""
        known, last = self._known, self._last
        if len(last) == len(workers):  # mostly the same ones in the same order
            changed = list(compress(workers, map(is_not, workers, last)))
        else:
            changed = [worker for worker in workers if known.get(worker.worker_id) is not worker]
        self._last = list(workers)
        self._num_changes += len(changed)
        if len(workers) != len(known) or self._num_changes > max(MAX_CHANGES, CHANGES_PER_WORKER * len(known)):
            self._start_over(workers)
            return
        for worker in changed:
            before, role = known.get(worker.worker_id), worker.role
            if before is None or before.fixed != worker.fixed:
                self._start_over(workers)
                return
            known[worker.worker_id] = worker
            costs = worker_costs(worker, self._rates, self._assumed[role])
            for use in self._uses[role]:
                use.replace(costs)

    def place(self, request: PlacementRequest) -> Placement | None:
        """None if no decode worker can serve it."""
        prefill, decode, local = self._prefill, self._decode, self._local
        fits = request.num_tokens < self._least_prefill_tokens or not prefill.members
        if request.exclude or request.max_total_tokens > self._least_decode_tokens or not fits:
            members = [*prefill.members, *local.members]
            prefill, decode, local = _uses([member for member in members if _can_serve(member.worker, request)])
        return Placement(request, prefill, decode, local) if local.members else None

    def _start_over(self, workers: Sequence[WorkerSnapshot]) -> None:
        ordered = sorted(workers, key=lambda worker: worker.worker_id)  # as every router orders them
        self._assumed, self._num_changes = assumed_rates(ordered, self._rates), 0
        self._known = {worker.worker_id: worker for worker in ordered}
        self._prefill, self._decode, self._local = _uses(
            [worker_costs(worker, self._rates, self._assumed[worker.role]) for worker in ordered]
        )
        # Nobody asks what it costs to decode alone while there is no prefill worker.
        decode = (self._decode, self._local) if self._prefill.members else (self._local,)
        self._uses = {PREFILL: (self._prefill,), DECODE: decode}
        most = {role: [w.max_request_tokens for w in ordered if w.role == role] for role in ROLES}
        self._least_prefill_tokens = min(most[PREFILL], default=0)
        self._least_decode_tokens = min(most[DECODE], default=0)


_Pair = tuple[float, int | None, int]
"""Rank, prefill worker or None, decode worker; the workers as positions among those that were considered."""


class Placement:
    """The decision on one request. What else was considered, and the terms, are worked out when they are asked for."""

    def __init__(self, request: PlacementRequest, prefill: Candidates, decode: Candidates, local: Candidates) -> None:
        self._request = request
        self._prefill, self._decode = list(prefill.members), list(local.members)  # as they are at this moment
        self._worth_ms, self._local_costs = local.worth_ms, local.costs
        self._prefill_held = prefill.held(request.matches, request.num_tokens) if prefill.members else []
        self._decode_held = local.held(request.matches, request.num_tokens)
        pairs = self._local_pairs(local)
        if prefill.members:
            pairs += self._split_pairs(prefill, decode)
        self._pairs = self._ordered(pairs)
        """Best first."""
        _, first, second = self._pairs[0]
        self.prefill_worker = "" if first is None else self._prefill[first].worker_id
        self.decode_worker = self._decode[second].worker_id

    @property
    def tokens_to_compute(self) -> int:
        """By the worker that computes the prompt, as far as is known."""
        _, first, second = self._pairs[0]
        return self._request.num_tokens - (self._decode_held[second] if first is None else self._prefill_held[first])

    @property
    def num_decode_workers(self) -> int:
        """That could serve it."""
        return len(self._decode)

    def considered(self, limit: int) -> list[PricedPair]:
        """The chosen pair, then the others, best first."""
        pairs = self._pairs
        if not self._prefill:
            near, local = {second for _, _, second in pairs}, Candidates(self._decode, self._local_costs)
            ranks = local.ranks(self._request.num_tokens, self._decode_held, self._request.max_total_tokens)
            others = sorted((i for i in range(len(ranks)) if i not in near), key=ranks.__getitem__)
            pairs = pairs + [(ranks[i], None, i) for i in others]
        return [self._priced(first, second) for _, first, second in pairs[:limit]]

    def _local_pairs(self, local: Candidates) -> list[_Pair]:
        """The decode worker computes the prompt, and its running streams wait meanwhile."""
        request, held = self._request, self._decode_held
        n, total = request.num_tokens, request.max_total_tokens
        if not self._prefill:  # the others when they are asked for
            return [(rank, None, i) for rank, i in local.best(request.matches, n, held, total)]
        most = request.max_local_tokens
        allowed = [i for i, tokens in enumerate(held) if n - tokens <= most] if most else ()
        if not allowed:
            return []
        ranks = local.ranks(n, held, total)
        return [(ranks[i], None, i) for i in _best(request, ranks, allowed, local)]

    def _split_pairs(self, prefill: Candidates, decode: Candidates) -> list[_Pair]:
        request = self._request
        first_ranks = prefill.ranks(request.num_tokens, self._prefill_held)
        second_ranks = decode.ranks(request.num_tokens, self._decode_held, request.max_total_tokens)
        firsts = _best(request, first_ranks, range(len(first_ranks)), prefill)
        seconds = _best(request, second_ranks, range(len(second_ranks)), decode)
        return [
            (first_ranks[first] + second_ranks[second] + self._transfer_ms(first, second), first, second)
            for first in firsts
            for second in seconds
        ]

    def _transfer_ms(self, first: int, second: int) -> float:
        """What is left of the transfer when the prompt is computed: blocks are sent while the next are computed."""
        n, prefill = self._request.num_tokens, self._prefill[first]
        missing, uncached = n - self._decode_held[second], n - self._prefill_held[first]
        return HANDOVER_MS + max(0.0, missing * self._decode[second].link_ms - uncached * prefill.token_ms)

    def _ordered(self, pairs: list[_Pair]) -> list[_Pair]:
        """Best first; those about as good as the best come first of all, in the order of their turn."""
        if len(pairs) == 1:
            return pairs
        pairs.sort(key=lambda pair: pair[0])
        limit = tied(pairs[0][0])
        num_tied = next((i for i, pair in enumerate(pairs) if pair[0] > limit), len(pairs))
        if num_tied > 1:
            pairs[:num_tied] = sorted(pairs[:num_tied], key=self._turn, reverse=True)
        return pairs

    def _turn(self, pair: _Pair) -> tuple[int, int, bool, int]:
        """Of equal pairs: who holds most; then, if anything is held, without a hand-over; then by rendezvous hash."""
        _, first, second = pair
        at_decode, key = self._decode_held[second], self._request.key
        weight = _weight(key, self._decode[second].seat)
        if first is None:
            return at_decode, at_decode, at_decode > 0, weight
        return self._prefill_held[first], at_decode, False, weight + _weight(key, self._prefill[first].seat)

    def _priced(self, first: int | None, second: int) -> PricedPair:
        n, decode = self._request.num_tokens, self._decode[second]
        computing = decode if first is None else self._prefill[first]
        held = self._decode_held[second] if first is None else self._prefill_held[first]
        compute_ms = (n - held) * computing.token_ms
        affinity_ms = self._worth_ms * held
        if first is None:
            moved = PriceTerm("decode_stall", compute_ms * decode.worker.running)
        else:
            moved = PriceTerm("transfer", self._transfer_ms(first, second))
            affinity_ms += self._decode_held[second] * decode.link_ms
        terms = (
            PriceTerm("prefill_queue", computing.queue_ms),
            PriceTerm("prefill_compute", compute_ms),
            moved,
            PriceTerm("decode_blocks", decode.blocks_ms(self._request.max_total_tokens)),
            PriceTerm("decode_step", decode.step_ms),
            PriceTerm("decode_slowdown", decode.slowdown_ms),
        )
        return PricedPair(
            "" if first is None else computing.worker_id, decode.worker_id, terms, affinity_ms, cached_tokens=held
        )


def _best(request: PlacementRequest, ranks: Sequence[float], allowed: Sequence[int], use: Candidates) -> Sequence[int]:
    """At most `MAX_PER_ROLE` of `allowed`, best first; of more that are equal those whose turn it is for the prompt."""
    if not allowed:
        return ()
    everybody = len(allowed) == len(ranks)
    limit = tied(min(ranks) if everybody else min(ranks[i] for i in allowed))
    near = (
        [i for i, rank in enumerate(ranks) if rank <= limit] if everybody else [i for i in allowed if ranks[i] <= limit]
    )
    if len(near) > MAX_PER_ROLE:
        near.sort(key=lambda i: _weight(request.key, use.members[i].seat), reverse=True)
    elif len(near) < MAX_PER_ROLE:
        near = sorted(allowed, key=ranks.__getitem__)
    return near[:MAX_PER_ROLE]


def _weight(key: int, seat: int) -> int:
    """Rendezvous hash: every router gives a worker the same weight for the same prompt, without talking."""
    mixed = ((key ^ seat) * _MIX) & _MASK
    return ((mixed ^ (mixed >> 32)) * _MIX) & _MASK


def _can_serve(worker: WorkerSnapshot, request: PlacementRequest) -> bool:
    if worker.worker_id in request.exclude:
        return False
    if worker.role == DECODE:
        return worker.max_request_tokens >= request.max_total_tokens
    return worker.max_request_tokens > request.num_tokens


def _uses(members: Sequence[WorkerCosts]) -> tuple[Candidates, Candidates, Candidates]:
    """To compute prompts for a decode worker, to decode, and to do both. The last two have the same members."""
    prefill = [member for member in members if member.worker.role == PREFILL]
    decode = [member for member in members if member.worker.role == DECODE]

    worth_ms = AFFINITY * min((member.token_ms for member in members), default=0.0)

    def local_costs(m: WorkerCosts) -> tuple[float, float, float]:
        token_ms = m.token_ms * (1 + m.worker.running)
        return m.queue_ms + m.step_ms + m.slowdown_ms, token_ms, token_ms + worth_ms

    return (
        Candidates(prefill, lambda m: (m.queue_ms, m.token_ms, m.token_ms + worth_ms)),
        Candidates(decode, lambda m: (m.step_ms + m.slowdown_ms, 0.0, m.link_ms)),
        Candidates(decode, local_costs, worth_ms),
    )
