"""What block events call the blocks of a request: routing keys once a router has said under which seed, else hashes."""

from __future__ import annotations

from engine.block_hash import pack_tokens
from engine.request import Request
from engine.routing_key import SHORT_BYTES, RunningRoutingKey


class BlockNames:
    """Writes `Request.block_names` and `Request.routing_key`; nobody else does."""

    def __init__(self) -> None:
        self._seed: int | None = None

    def use_seed(self, seed: int) -> None:
        """Name blocks by the short routing keys of this seed, eight bytes, little-endian. Once, before any request."""
        self._seed = seed

    def of(self, request: Request, block_size: int) -> list[bytes]:
        """Of all full blocks of its tokens; an empty name stands for the hash."""
        names, num_full = request.block_names, len(request.token_ids) // block_size
        if self._seed is None:
            names += [b""] * (num_full - len(names))
            return names
        if request.routing_key is None:
            request.routing_key = RunningRoutingKey(self._seed, request.scope, request.num_public_tokens)
        for i in range(len(names), num_full):
            tokens = pack_tokens(request.token_ids[i * block_size : (i + 1) * block_size])
            names.append(request.routing_key.extend_short(tokens).to_bytes(SHORT_BYTES, "little"))
        return names
