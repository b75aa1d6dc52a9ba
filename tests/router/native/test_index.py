"""What is the native index's alone; `tests/router/test_prefix_index.py` has what both do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from index_implementations import library, make

from engine.block_hash import pack_tokens
from engine.native import build
from engine.routing_key import KEY_BYTES, SHORT_BITS, RoutingKeys
from router.native.index import NativeIndex, load_library, make_index
from router.prefix_index import pack_keys

ROOT = Path(__file__).parents[3]
VECTORS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/routing_key.json").read_text())["vectors"]
OUT_OF_MEMORY = """
import resource
from index_implementations import library
from engine.errors import CapacityError
from router.native.index import NativeIndex
from router.prefix_index import MAX_KEYS, pack_keys

index = NativeIndex(library(), 16 << 30)
slots = [index.add_worker() for _ in range(3)]
batches = [pack_keys(range(n * MAX_KEYS, (n + 1) * MAX_KEYS)) for n in range(64)]
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
known = 0
try:
    for batch in batches:
        for slot in slots:
            known += index.apply(slot, b"", batch)[1]
except CapacityError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
index.check_integrity()
assert known <= sum(1 for slot in slots for _ in index.resident(slot)) < 3 * 64 * MAX_KEYS
index.drop_worker(slots[0])
for _ in range(1024):
    index.maintain()
index.check_integrity()
"""


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_its_routing_keys_are_those_of_the_rule(vector: dict[str, Any]) -> None:
    tokens, scope = pack_tokens(vector["token_ids"]), bytes.fromhex(vector["scope"])
    public = vector.get("num_public_tokens", 0)
    prompt = RoutingKeys(int(vector["seed"]), scope, tokens, vector["block_size"], public)
    expected = [int(key, 16) >> 8 * KEY_BYTES - SHORT_BITS for key in vector["keys"]]
    assert make(NativeIndex, 1 << 20)._packed(prompt) == pack_keys(expected)


@pytest.mark.parametrize("flags", [(*build.C_FLAGS, build.THIS_CPU), build.C_FLAGS], ids=["this CPU", "any CPU"])
@pytest.mark.parametrize("block_size", [1, 2, 8, 16, 32, 300])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_it_hashes_prompts_of_any_length_like_the_xxhash_package(
    seed: int, block_size: int, flags: Sequence[str]
) -> None:
    index = NativeIndex(load_library(build.default_cache(), flags), 1 << 20)
    for num_tokens in (0, 1, 60, 61, 700, 1501):
        for scope, num_public_tokens in ((b"", 0), (b"x" * 40, 37), (b"tenant", 1400)):
            tokens = bytes(n * 7 % 251 for n in range(4 * num_tokens))
            prompt = RoutingKeys(seed, scope, tokens, block_size, num_public_tokens)
            assert index._packed(prompt) == pack_keys(prompt.all_short())


@pytest.mark.parametrize("shift", [0, 16, 40, 44])
def test_keys_that_were_chosen_to_collide_make_no_long_chain(shift: int) -> None:
    index = make(NativeIndex, 1 << 30)  # with room for all of them in one table
    slot = index.add_worker()
    index.store(slot, [n << shift for n in range(5000)])
    index.check_integrity()


def test_without_memory_it_says_so_and_stays_whole() -> None:
    library()  # made before the limit
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "no memory for the prefix index\n"), done.stderr


def test_without_a_compiler_the_index_is_python_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    index = make_index(1 << 20, 10.0, str(tmp_path / "cache"))
    assert index.implementation.startswith("python: no compiler")
    assert "the prefix index is Python's" in caplog.text
    assert make_index(1 << 20, 10.0, "").implementation == "python: no native_cache is set"
    assert make_index(1 << 20, 10.0, str(build.default_cache())).implementation == "native"
