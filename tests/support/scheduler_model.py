"""A scheduler whose batches are computed by nobody: what it decides, step by step, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from factories import fake_identity, make_request

from engine.batch import ScheduledBatch
from engine.block_manager import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.growth import GrowthPolicy
from engine.request import Request, RequestKind
from engine.scheduler import Scheduler


class Policy:
    """Blocks of 4 tokens. Every sequence that samples gets token 7."""

    def __init__(
        self, num_blocks: int, budget: int, max_num_seqs: int, max_waiting: int, growth: GrowthPolicy | None
    ) -> None:
        cache_config = CacheConfig(num_blocks=num_blocks, block_size=4)
        config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs, max_waiting=max_waiting)
        self.now = 0.0
        self.pool = BlockManager(cache_config)
        self.scheduler = Scheduler(config, cache_config, self.pool, fake_identity(), max_model_len=100, growth=growth)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        kind: RequestKind = RequestKind.LOCAL,
        priority: int = 0,
        scope: bytes = b"tenant",
    ) -> Request:
        """Arrives `now`."""
        request = make_request(
            prompt, max_tokens=max_tokens, kind=kind, priority=priority, scope=scope, arrival=self.now
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[Request, int]]:
        """Who computed how many tokens."""
        batch = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        self._compute(batch)
        self.scheduler.check_integrity()
        return [(sequence.request, sequence.num_tokens) for sequence in batch.sequences]

    def _compute(self, batch: ScheduledBatch) -> None:
        for sequence in batch.sequences:
            request = sequence.request
            self.scheduler.computed(sequence)
            if not sequence.samples:
                continue
            request.token_ids.append(7)
            if request.kind is RequestKind.PREFILL:
                self.scheduler.hold(request)
            elif request.num_output_tokens == request.params.max_tokens:
                self.scheduler.finish(request)


class PolicyFactory:
    def __init__(self) -> None:
        self.made: list[Policy] = []

    def __call__(
        self,
        *,
        num_blocks: int = 32,
        budget: int = 16,
        max_num_seqs: int = 4,
        max_waiting: int = 8,
        growth: GrowthPolicy | None = None,
    ) -> Policy:
        self.made.append(Policy(num_blocks, budget, max_num_seqs, max_waiting, growth))
        return self.made[-1]

    def close(self) -> None:
        for policy in self.made:
            policy.scheduler.check_integrity()


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))
