"""Block tables over a memory that remembers what was written where, so that a test sees who reads whose KV."""

from __future__ import annotations

from collections.abc import Sequence

from factories import fake_identity, make_request

from engine.block_manager import BlockManager
from engine.block_tables import BlockTables
from engine.config import CacheConfig
from engine.request import Request, RequestKind

Kv = tuple[int, ...] | None
"""KV of one token: the token and all before it. None: never written."""


class TableModel:
    """Block tables, their pool, the requests that hold blocks, and the memory that these write and read."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        block_size: int = 4,
        caching: bool = True,
        sliding_window: int | None = None,
        max_pinned_share: float = 0.25,
    ) -> None:
        self.config = CacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=caching,
            sliding_window=sliding_window,
            max_pinned_share=max_pinned_share,
        )
        self.memory: list[list[Kv]] = [[None] * block_size for _ in range(num_blocks)]
        self.pool = BlockManager(self.config, copy_block=self._copy)
        self.tables = BlockTables(self.config, self.pool, fake_identity(block_size))
        self.holding: list[Request] = []

    def try_admit(self, request: Request) -> bool:
        plan = self.tables.plan(request)
        if not self.pool.can_allocate(plan.num_new, keeping=plan.cached):
            return False
        self.tables.hold(plan)
        self.tables.fill(plan)
        self.holding.append(request)
        return True

    def admit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        kind: RequestKind = RequestKind.LOCAL,
        scope: bytes = b"tenant",
    ) -> Request:
        request = make_request(prompt, max_tokens=max_tokens, kind=kind, scope=scope)
        assert self.try_admit(request)
        return request

    def fork(self, parent: Request, tokens: Sequence[int] | None = None, num_tokens: int | None = None) -> Request:
        """By default with the parent's tokens, from all that it has computed."""
        child = make_request(parent.token_ids if tokens is None else tokens, scope=parent.scope)
        shared = parent.num_computed_tokens if num_tokens is None else num_tokens
        assert self.tables.fork(parent, child, shared)
        self.holding.append(child)
        return child

    def compute(self, request: Request, count: int | None = None) -> None:
        """Write the KV of so many more tokens, all by default. There must be room for it."""
        count = request.num_uncomputed_tokens if count is None else count
        assert count <= self.tables.room(request)
        for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
            self.write(request, position)
        request.num_computed_tokens += count
        self.tables.publish(request)

    def append(self, request: Request, *tokens: int) -> bool:
        """Decode: one token after the other. False, and no token, if there is no room for the next."""
        for token in tokens:
            request.token_ids.append(token)
            if not self.tables.grow(request):
                request.token_ids.pop()
                return False
            self.compute(request)
        return True

    def write(self, request: Request, position: int) -> None:
        block, offset = divmod(position, self.config.block_size)
        self.memory[request.block_table[block]][offset] = tuple(request.token_ids[: position + 1])

    def free(self, request: Request, busy: Sequence[int] = ()) -> None:
        self.tables.free(request, busy)
        self.holding.remove(request)

    def check(self) -> None:
        """No block lost, and every request finds in its blocks just what it, or an equal one, has written."""
        self.tables.check_integrity(self.holding)
        size = self.config.block_size
        window = self.config.sliding_window or self.config.num_blocks * size
        for request in self.holding:
            given_back = request.num_released_blocks * size
            follows = request.num_computed_tokens if request.adoption is None else request.adoption.num_tokens - 1
            assert given_back <= max(0, follows + 1 - window), "the next token looks further back"
            for position in range(given_back, request.num_computed_tokens):
                block, offset = divmod(position, size)
                found = self.memory[request.block_table[block]][offset]
                assert found == tuple(request.token_ids[: position + 1]), f"{request.request_id} reads another's KV"

    def _copy(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])
