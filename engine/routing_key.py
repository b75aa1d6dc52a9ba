"""Key under which a router looks a prefix up: which worker probably has its KV? A prediction, never an identity.

The key is 128 bits of xxh3 over scope and *whole* prefix. It costs a tenth of a chained SHA-256, and the key of any one
boundary is one call, so a binary search over a prompt's boundaries hashes only those that it probes. In return whoever
knows the seed can make two prefixes collide. So a match decides where a request goes and nothing else: KV is reused by
the identity of `engine.block_hash` alone, and a wrong guess costs a recompute. The seed belongs to a cluster and is not
shown to clients. Knows no workers and no pools.

The rule, complete enough to write a second implementation from (`tests/data/routing_key.json` holds vectors):

    key of a prefix = XXH3-128(len(scope) (u32 LE) || scope || token ids (u32 LE each), seed = the cluster's u64),
                      in xxHash's canonical form (16 bytes, big-endian)

taken at every block boundary: of the first block_size, 2 x block_size, ... tokens. Tokens after the last full block
have no key. A prefix of public tokens only has its key under the scope "public"; longer ones under their own, whole.

Where many are kept or sent, the *short* key does: the first 60 bits, as a number; on the wire a little-endian u64.
"""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from engine.block_hash import PUBLIC_SCOPE, TOKEN_BYTES
from engine.errors import InternalError

KEY_BYTES = 16
MAX_SEED = 2**64 - 1
SHORT_BITS = 60
"""Two digits of a Python int: 32 bytes in memory, where 61 to 64 bits would take 48."""
SHORT_BYTES = 8
_DROPPED_BITS = 8 * KEY_BYTES - SHORT_BITS


class RoutingKeys:
    """The keys of one prompt at its block boundaries, worked out when they are asked for."""

    __slots__ = (
        "_data",
        "_num_blocks",
        "_num_public_tokens",
        "_public",
        "_scope",
        "_seed",
        "_start",
        "_step",
        "_view",
    )

    def __init__(self, seed: int, scope: bytes, token_ids: bytes, block_size: int, num_public_tokens: int = 0) -> None:
        """`token_ids` as `engine.block_hash.pack_tokens` makes them; `seed` is in [0, 2^64)."""
        self._seed = _checked(seed)
        self._scope = scope
        self._step = block_size * TOKEN_BYTES
        self._num_blocks = len(token_ids) // self._step
        self._num_public_tokens = num_public_tokens
        preamble = _preamble(scope)
        self._start = len(preamble)
        self._data = preamble + token_ids
        self._view = memoryview(self._data)
        num_public_bytes = num_public_tokens // block_size * self._step
        self._public = (
            RoutingKeys(seed, PUBLIC_SCOPE, token_ids[:num_public_bytes], block_size) if num_public_bytes else None
        )
        """The keys of the public blocks."""

    def __len__(self) -> int:
        """Full blocks, each of which ends at a boundary with a key."""
        return self._num_blocks

    @property
    def num_first_bytes(self) -> int:
        """That are hashed for one block, the fewest of all."""
        start = self._start if self._public is None else min(self._start, self._public._start)
        return start + self._step

    def native_arguments(self) -> tuple[bytes, int, int, int, bytes, int, int, int]:
        """For native code with the same rule: the bytes that are hashed, where the first block begins in them, bytes of
        a block, blocks; then bytes, beginning and blocks of the public part; the seed."""
        public = self._public
        common = (b"", 0, 0) if public is None else (public._data, public._start, public._num_blocks)
        return self._data, self._start, self._step, self._num_blocks, *common, self._seed

    def key(self, num_blocks: int) -> bytes:
        """Of the first `num_blocks` blocks, 1 to `len(self)`. One pass over the prefix, at memory speed."""
        if not 1 <= num_blocks <= self._num_blocks:
            raise InternalError(f"a prefix of {num_blocks} blocks has no key: the prompt has {self._num_blocks}")
        if self._public is not None and num_blocks <= len(self._public):
            return self._public.key(num_blocks)
        return xxhash.xxh3_128_digest(self._view[: self._start + num_blocks * self._step], self._seed)

    def prober(self) -> Callable[[int], int]:
        """From a number of blocks, 1 to `len(self)` (not checked: it is called in the innermost loop), to the short
        form of `key`."""
        data, start, step, seed, digest = self._view, self._start, self._step, self._seed, xxhash.xxh3_128_intdigest
        if self._public is None:
            return lambda num_blocks: digest(data[: start + num_blocks * step], seed) >> _DROPPED_BITS
        num_public, public = len(self._public), self._public.prober()
        return lambda num_blocks: (
            public(num_blocks)
            if num_blocks <= num_public
            else digest(data[: start + num_blocks * step], seed) >> _DROPPED_BITS
        )

    def all(self) -> list[bytes]:
        """Of every boundary, in order. One pass over the prompt."""
        running = RunningRoutingKey(self._seed, self._scope, self._num_public_tokens)
        return [running.extend(self._view[i : i + self._step]) for i in self._block_starts()]

    def all_short(self) -> list[int]:
        """The short form of `all()`."""
        running = RunningRoutingKey(self._seed, self._scope, self._num_public_tokens)
        return [running.extend_short(self._view[i : i + self._step]) for i in self._block_starts()]

    def _block_starts(self) -> range:
        return range(self._start, self._start + self._num_blocks * self._step, self._step)


class RunningRoutingKey:
    """The key of a sequence that grows, such as a request that generates: block after block, no token read twice."""

    def __init__(self, seed: int, scope: bytes, num_public_tokens: int = 0) -> None:
        """`seed` is in [0, 2^64)."""
        self._state = xxhash.xxh3_128(_preamble(scope), _checked(seed))
        self._public = xxhash.xxh3_128(_preamble(PUBLIC_SCOPE), seed)
        self._public_bytes_left = num_public_tokens * TOKEN_BYTES

    def extend(self, token_ids: bytes | memoryview) -> bytes:
        """Key of the prefix that ends with these tokens: one full block, packed, or several."""
        return self._extended(token_ids).digest()

    def extend_short(self, token_ids: bytes | memoryview) -> int:
        """The short form of `extend`."""
        return self._extended(token_ids).intdigest() >> _DROPPED_BITS

    def _extended(self, token_ids: bytes | memoryview) -> xxhash.xxh3_128:
        self._state.update(token_ids)
        if self._public_bytes_left <= 0:
            return self._state
        self._public.update(token_ids)
        self._public_bytes_left -= len(token_ids)
        return self._public if self._public_bytes_left >= 0 else self._state


def _preamble(scope: bytes) -> bytes:
    return len(scope).to_bytes(4, "little") + scope


def _checked(seed: int) -> int:
    if not 0 <= seed <= MAX_SEED:
        raise InternalError(f"the seed of routing keys must be in [0, 2^64), got {seed}")
    return seed
