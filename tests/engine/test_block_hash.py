"""Block identity against published vectors and against a second implementation, written from the documented rule."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.block_hash import PUBLIC_SCOPE, BlockIdentity, block_chain, extend_chain, pack_tokens, unpack_tokens
from engine.errors import RequestError

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "block_hash.json").read_text())[
    "vectors"
]

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=70)
SCOPES = st.binary(max_size=40).filter(lambda scope: scope != PUBLIC_SCOPE)
"""Of tenants."""


def second_implementation(
    identity: dict[str, Any], tokens: list[int], num_public: int = 0
) -> tuple[bytes, list[bytes]]:
    """Root and chain, from the rule in the docstring of `engine.block_hash` and struct alone."""

    def text(value: str) -> bytes:
        return struct.pack("<cI", b"s", len(value.encode())) + value.encode()

    def blob(value: bytes) -> bytes:
        return struct.pack("<cI", b"b", len(value)) + value

    state = hashlib.sha256()
    state.update(text("kvrelay.block.v1"))
    state.update(blob(bytes.fromhex(identity["model_fingerprint"])))
    state.update(text(identity["kv_dtype"]))
    state.update(struct.pack("<cIQ", b"u", 8, identity["block_size"]))
    state.update(blob(bytes.fromhex(identity["adapter_digest"])))
    of_public = state.copy()
    state.update(blob(bytes.fromhex(identity["scope"])))
    of_public.update(blob(b"public"))
    size = identity["block_size"]
    root = of_public.digest() if num_public >= size else state.digest()

    chain: list[bytes] = []
    parent = root
    while tokens:
        block, tokens = tokens[:size], tokens[size:]
        if chain and len(chain) * size <= num_public < (len(chain) + 1) * size:
            scope = bytes.fromhex(identity["scope"])
            parent = hashlib.sha256(text("kvrelay.entry.v1") + blob(parent) + blob(scope)).digest()
        parent = hashlib.sha256(parent + struct.pack(f"<I{len(block)}I", len(block), *block)).digest()
        chain.append(parent)
    return root, chain


def identity_of(vector: dict[str, Any]) -> BlockIdentity:
    return BlockIdentity(
        model_fingerprint=bytes.fromhex(vector["model_fingerprint"]),
        kv_dtype=vector["kv_dtype"],
        block_size=vector["block_size"],
        adapter_digest=bytes.fromhex(vector["adapter_digest"]),
    )


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_the_published_vectors_hold(vector: dict[str, Any]) -> None:
    identity, scope = identity_of(vector), bytes.fromhex(vector["scope"])
    num_public = vector.get("num_public_tokens", 0)
    chain = identity.chain(scope, pack_tokens(vector["token_ids"]), num_public)

    assert identity.parent(scope, [], num_public).hex() == vector["root"]
    assert [block.hex() for block in chain] == vector["chain"]


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_a_second_implementation_reproduces_the_vectors(vector: dict[str, Any]) -> None:
    root, chain = second_implementation(vector, vector["token_ids"], vector.get("num_public_tokens", 0))

    assert root.hex() == vector["root"]
    assert [block.hex() for block in chain] == vector["chain"]


@given(tokens=token_ids, block_size=st.sampled_from([1, 4, 16]), scope=st.binary(max_size=40))
def test_both_implementations_agree_on_any_sequence(tokens: list[int], block_size: int, scope: bytes) -> None:
    fields = {"model_fingerprint": "aa" * 32, "kv_dtype": "float32", "block_size": block_size, "adapter_digest": ""}
    root = identity_of(fields).root(scope)

    assert (root, block_chain(root, pack_tokens(tokens), block_size)) == second_implementation(
        {**fields, "scope": scope.hex()}, tokens
    )


@given(
    tokens=token_ids,
    block_size=st.sampled_from([1, 4, 8, 16]),
    scopes=st.tuples(SCOPES, SCOPES).filter(lambda pair: pair[0] != pair[1]),
    num_public=st.integers(0, 70),
)
def test_two_scopes_share_the_public_blocks_and_no_other(
    tokens: list[int], block_size: int, scopes: tuple[bytes, bytes], num_public: int
) -> None:
    fields = {"model_fingerprint": "aa" * 32, "kv_dtype": "float32", "block_size": block_size, "adapter_digest": ""}
    num_public = min(num_public, len(tokens))
    one, other = (identity_of(fields).chain(scope, pack_tokens(tokens), num_public) for scope in scopes)
    private = identity_of(fields).chain(scopes[0], pack_tokens(tokens))

    num_shared = num_public // block_size
    assert one[:num_shared] == other[:num_shared]
    assert not set(one[num_shared:]) & set(other)
    assert not set(one) & set(private) or (num_shared == 0 and one == private)
    for scope, chain in zip(scopes, (one, other), strict=True):
        assert second_implementation({**fields, "scope": scope.hex()}, tokens, num_public)[1] == chain


def test_without_a_public_block_the_chain_is_that_of_the_root() -> None:
    identity = BlockIdentity(bytes(32), "bfloat16", 4)
    tokens = pack_tokens(list(range(11)))

    assert identity.chain(b"a", tokens, 3) == block_chain(identity.root(b"a"), tokens, 4)
    assert identity.chain(b"a", tokens, 4) != block_chain(identity.root(b"a"), tokens, 4)


@given(tokens=token_ids)
def test_packed_tokens_unpack_to_themselves(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)

    assert packed == struct.pack(f"<{len(tokens)}I", *tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_torn_token_id_is_refused_by_field(size: int) -> None:
    with pytest.raises(RequestError, match="4 bytes a token") as caught:
        unpack_tokens(bytes(size))
    assert caught.value.field == "prompt_token_ids"


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7"])
def test_an_id_that_is_no_u32_is_refused_by_field(bad: Any) -> None:
    with pytest.raises(RequestError) as caught:
        pack_tokens([bad])
    assert caught.value.field == "prompt_token_ids"


def test_a_partial_block_is_not_the_full_block_that_begins_alike() -> None:
    root = BlockIdentity(bytes(32), "bfloat16", 4).root(b"")

    assert extend_chain(root, pack_tokens([1, 2, 3])) != extend_chain(root, pack_tokens([1, 2, 3, 0]))


def test_equal_tokens_after_another_prefix_are_another_block() -> None:
    root = BlockIdentity(bytes(32), "bfloat16", 2).root(b"")
    one = block_chain(root, pack_tokens([1, 2, 7, 8]), 2)
    other = block_chain(root, pack_tokens([1, 3, 7, 8]), 2)

    assert one[1] != other[1]


def test_every_part_of_the_identity_changes_the_root() -> None:
    base = BlockIdentity(bytes(32), "bfloat16", 16)
    roots = {
        base.root(b"tenant-a"),
        base.root(b"tenant-b"),
        BlockIdentity(b"\1" + bytes(31), "bfloat16", 16).root(b"tenant-a"),
        BlockIdentity(bytes(32), "float16", 16).root(b"tenant-a"),
        BlockIdentity(bytes(32), "bfloat16", 32).root(b"tenant-a"),
        BlockIdentity(bytes(32), "bfloat16", 16, b"\2" * 32).root(b"tenant-a"),
    }

    assert len(roots) == 6


def test_a_byte_that_moves_between_neighbouring_fields_changes_the_root() -> None:
    one = BlockIdentity(bytes(32), "bfloat16", 16, adapter_digest=b"ab").root(b"c")
    other = BlockIdentity(bytes(32), "bfloat16", 16, adapter_digest=b"a").root(b"bc")

    assert one != other


def test_no_tokens_make_no_blocks() -> None:
    assert block_chain(bytes(32), b"", 16) == []
