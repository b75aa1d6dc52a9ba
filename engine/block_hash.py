"""What makes two KV blocks the same block: a chain of SHA-256 over content, model, adapter and tenant scope.

A pure function: equal in every process, on every machine, after every restart. Knows no block ids and no pools.

The rule, complete enough to write a second implementation from (`tests/data/block_hash.json` holds vectors):

    field(tag, data) = tag (1 byte) || len(data) (u32 LE) || data
    text(s)          = field("s", UTF-8 of s)
    blob(b)          = field("b", b)
    number(n)        = field("u", n as u64 LE)

    root    = SHA-256(text("kvrelay.block.v1") || blob(model fingerprint) || text(KV dtype) || number(block size)
                      || blob(adapter digest) || blob(scope))
    block i = SHA-256(block i-1, or the root || count (u32 LE) || count token ids (u32 LE each))

Every hash is 32 bytes. `count` tells a partial block from a full one that begins alike.

A sequence may begin with tokens that are public: whoever sends them, full blocks of nothing else are the same blocks.
They follow root("public"), and the first block behind them, if there are any, has for parent not the last of them but

    entry   = SHA-256(text("kvrelay.entry.v1") || blob(hash of the last public block) || blob(scope))

So from there on every scope has its own blocks again, and without a public block nothing changes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from engine.errors import RequestError

HASH_BYTES = 32
TOKEN_BYTES = 4
PUBLIC_SCOPE = b"public"
_LABEL, _ENTRY_LABEL = "kvrelay.block.v1", "kvrelay.entry.v1"
_U32 = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)
_SWAPPED = sys.byteorder == "big"


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32, the form in which they travel and are hashed.

    Raises `RequestError` (field `prompt_token_ids`) if an id is no integer in [0, 2^32).
    """
    try:
        packed = array(_U32, token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError("prompt_token_ids", f"each must be an integer in [0, 2^32): {error}") from error
    if _SWAPPED:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises `RequestError` (field `prompt_token_ids`) on a torn last id."""
    if len(data) % TOKEN_BYTES:
        raise RequestError("prompt_token_ids", f"must be {TOKEN_BYTES} bytes a token, got {len(data)} bytes")
    packed = array(_U32)
    packed.frombytes(data)
    if _SWAPPED:
        packed.byteswap()
    return packed.tolist()


@dataclass(frozen=True, slots=True)
class BlockIdentity:
    """All that decides a block's KV bytes besides its tokens and those before it."""

    model_fingerprint: bytes
    kv_dtype: str
    """With its quantisation, where there is one."""
    block_size: int
    """Tokens of a full block."""
    adapter_digest: bytes = b""
    """Of the adapter's content, not its name; empty without an adapter."""

    def root(self, scope: bytes) -> bytes:
        """Parent of the first block of every prompt in `scope`, 32 bytes. Scopes never share a block."""
        fields = (
            _field(b"s", _LABEL.encode()),
            _field(b"b", self.model_fingerprint),
            _field(b"s", self.kv_dtype.encode()),
            _field(b"u", self.block_size.to_bytes(8, "little")),
            _field(b"b", self.adapter_digest),
            _field(b"b", scope),
        )
        return sha256(b"".join(fields)).digest()

    def parent(self, scope: bytes, chain: Sequence[bytes], num_public_tokens: int = 0) -> bytes:
        """What the block behind `chain`, all blocks before it, follows in a sequence with so many public tokens."""
        num_public = num_public_tokens // self.block_size
        if not chain:
            return self.root(PUBLIC_SCOPE if num_public else scope)
        if len(chain) != num_public:
            return chain[-1]
        fields = (_field(b"s", _ENTRY_LABEL.encode()), _field(b"b", chain[-1]), _field(b"b", scope))
        return sha256(b"".join(fields)).digest()

    def chain(self, scope: bytes, token_ids: bytes, num_public_tokens: int = 0) -> list[bytes]:
        """Hashes of all blocks of a sequence, in order. The last one may be of a partial block; none for no tokens."""
        chain: list[bytes] = []
        step = self.block_size * TOKEN_BYTES
        for start in range(0, len(token_ids), step):
            parent = self.parent(scope, chain, num_public_tokens)
            chain.append(extend_chain(parent, token_ids[start : start + step]))
        return chain


def extend_chain(parent: bytes, token_ids: bytes) -> bytes:
    """Hash of the one block that holds `token_ids` (as `pack_tokens` makes them) and follows `parent`."""
    count = len(token_ids) // TOKEN_BYTES
    return sha256(parent + count.to_bytes(4, "little") + token_ids).digest()


def block_chain(root: bytes, token_ids: bytes, block_size: int) -> list[bytes]:
    """Hashes of all blocks of a sequence, in order. The last one may be of a partial block; none for no tokens."""
    chain: list[bytes] = []
    parent = root
    step = block_size * TOKEN_BYTES
    for start in range(0, len(token_ids), step):
        parent = extend_chain(parent, token_ids[start : start + step])
        chain.append(parent)
    return chain


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(4, "little") + data
