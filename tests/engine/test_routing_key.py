"""Routing keys against published vectors and against a second implementation, xxh3 included."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from xxh3_reference import xxh3_128

from engine.block_hash import pack_tokens
from engine.errors import InternalError
from engine.routing_key import KEY_BYTES, MAX_SEED, RoutingKeys, RunningRoutingKey

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "routing_key.json").read_text())[
    "vectors"
]
BY_NAME = pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])


def second_implementation(seed: int, scope: bytes, tokens: list[int], num_public: int = 0) -> bytes:
    """Key of a prefix, from the rule in the docstring of `engine.routing_key`."""
    scope = b"public" if len(tokens) <= num_public else scope
    return xxh3_128(struct.pack("<I", len(scope)) + scope + struct.pack(f"<{len(tokens)}I", *tokens), seed)


def keys_of(vector: dict[str, Any]) -> RoutingKeys:
    scope, token_ids = bytes.fromhex(vector["scope"]), pack_tokens(vector["token_ids"])
    num_public = vector.get("num_public_tokens", 0)
    return RoutingKeys(int(vector["seed"]), scope, token_ids, vector["block_size"], num_public)


@BY_NAME
def test_the_published_vectors_hold(vector: dict[str, Any]) -> None:
    keys = keys_of(vector)
    assert [key.hex() for key in keys.all()] == vector["keys"]
    assert len(keys) == len(vector["keys"])


@BY_NAME
def test_a_second_implementation_reproduces_the_vectors(vector: dict[str, Any]) -> None:
    size, scope = vector["block_size"], bytes.fromhex(vector["scope"])
    for i, key in enumerate(vector["keys"], 1):
        prefix, num_public = vector["token_ids"][: i * size], vector.get("num_public_tokens", 0)
        assert second_implementation(int(vector["seed"]), scope, prefix, num_public).hex() == key


@given(st.binary(min_size=17, max_size=1200), st.integers(0, MAX_SEED))
def test_the_second_implementation_of_xxh3_agrees_with_the_library(data: bytes, seed: int) -> None:
    assert xxh3_128(data, seed) == xxhash.xxh3_128_digest(data, seed)


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=70),
    block_size=st.sampled_from([4, 8, 16]),
    scope=st.binary(max_size=40),
    seed=st.integers(0, MAX_SEED),
    num_public=st.integers(0, 70),
)
def test_one_boundary_all_boundaries_and_the_second_implementation_agree(
    tokens: list[int], block_size: int, scope: bytes, seed: int, num_public: int
) -> None:
    keys = RoutingKeys(seed, scope, pack_tokens(tokens), block_size, num_public)
    running, probe = RunningRoutingKey(seed, scope, num_public), keys.prober()
    every = keys.all()
    assert len(every) == len(keys) == len(tokens) // block_size
    for i, key in enumerate(every, 1):
        assert len(key) == KEY_BYTES
        assert key == keys.key(i)
        assert key == running.extend(pack_tokens(tokens[(i - 1) * block_size : i * block_size]))
        assert key == second_implementation(seed, scope, tokens[: i * block_size], num_public)
        assert probe(i) == int(key.hex()[:15], 16)


def test_a_key_depends_on_everything_before_it() -> None:
    tokens = list(range(64))
    key = RoutingKeys(0, b"a", pack_tokens(tokens), 16).key(4)
    assert RoutingKeys(0, b"a", pack_tokens([9, *tokens[1:]]), 16).key(4) != key
    assert RoutingKeys(0, b"b", pack_tokens(tokens), 16).key(4) != key
    assert RoutingKeys(1, b"a", pack_tokens(tokens), 16).key(4) != key


def test_two_scopes_have_the_keys_of_public_blocks_in_common_and_no_other() -> None:
    tokens = pack_tokens(list(range(64)))
    one, other = (RoutingKeys(0, scope, tokens, 16, num_public_tokens=40).all() for scope in (b"a", b"b"))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other)


def test_a_key_does_not_depend_on_the_block_size_or_on_what_follows() -> None:
    tokens = list(range(70))
    key = RoutingKeys(0, b"a", pack_tokens(tokens), 16).key(4)
    assert RoutingKeys(0, b"a", pack_tokens(tokens[:64]), 64).key(1) == key


def test_scope_and_tokens_cannot_be_shifted_into_each_other() -> None:
    one, other = pack_tokens([1, 2, 3, 4]), pack_tokens([2, 3, 4])
    scope = pack_tokens([1])
    assert RoutingKeys(0, b"", one, 4).key(1) != RunningRoutingKey(0, scope).extend(other)


@pytest.mark.parametrize("num_blocks", [-1, 0, 3])
def test_there_is_no_key_without_a_full_block_to_end_at(num_blocks: int) -> None:
    keys = RoutingKeys(0, b"", pack_tokens(list(range(11))), 4)
    with pytest.raises(InternalError, match="the prompt has 2"):
        keys.key(num_blocks)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_has_64_bits(seed: int) -> None:
    with pytest.raises(InternalError, match="seed"):
        RoutingKeys(seed, b"", b"", 16)
    with pytest.raises(InternalError, match="seed"):
        RunningRoutingKey(seed, b"")


@BY_NAME
def test_short_keys_are_the_first_60_bits(vector: dict[str, Any]) -> None:
    keys = keys_of(vector)
    probe = keys.prober()
    expected = [int(key[:15], 16) for key in vector["keys"]]
    assert keys.all_short() == expected
    assert [probe(n) for n in range(1, len(keys) + 1)] == expected
