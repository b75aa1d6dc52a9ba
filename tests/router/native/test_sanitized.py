"""Random calls of the native index, compiled to notice what C does not define, beside the one in Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.native import build

ROOT = Path(__file__).parents[3]
FLAGS = (*build.C_FLAGS, "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
PROGRAM = """
import random, sys
from pathlib import Path
from engine.routing_key import RoutingKeys
from router.native.index import NativeIndex, load_library
from router.prefix_index import PackedKeys, unpack_keys, pack_keys
from router.reference_index import ReferenceIndex

library = load_library(Path(sys.argv[1]), sys.argv[2:])
for seed, roomy in enumerate((True, False)):
    rng, now = random.Random(seed), 0.0
    native = NativeIndex(library, 8 << 20 if roomy else NativeIndex.least_bytes())
    reference = ReferenceIndex(64 << 20)
    slots = [(native.add_worker(), reference.add_worker()) for _ in range(70)]
    pool = [rng.getrandbits(60) for _ in range(1500)]
    for _ in range(1200):
        both = list(zip((native, reference), rng.choice(slots)))
        some, others = (pack_keys(rng.sample(pool, rng.randrange(40))) for _ in range(2))
        prompt = RoutingKeys(
            rng.getrandbits(64), bytes(rng.randrange(40)), rng.randbytes(rng.randrange(3000)), rng.choice([4, 8, 16]),
            rng.choice([0, 0, 50]),
        )
        known = PackedKeys(unpack_keys(some))
        draw, turns = rng.random(), rng.choice([1, 50, 300])
        if draw < 0.02:
            gone = rng.randrange(len(slots))
            for index, slot in zip((native, reference), slots[gone]):
                index.drop_worker(slot)
            slots[gone] = native.add_worker(), reference.add_worker()
        elif draw < 0.1:
            [index.maintain() for index in (native, reference) for _ in range(turns)]
        elif draw < 0.2:
            [index.speculate_prompt([slot], prompt, now) for index, slot in both]
        else:
            changes = [index.apply(slot, some, others) for index, slot in both]
            assert not roomy or changes[0] == changes[1]
        for keys in (prompt, known):
            found = [index.lookup(keys, now) for index in (native, reference)]
            assert not roomy or found[0] == found[1]
        now += rng.random() * 0.1
    native.check_integrity()
    assert native.stats().num_bytes <= native.stats().max_bytes
print("whole")
"""


def test_random_calls_touch_nothing_but_the_index_and_its_arguments() -> None:
    asan = ""
    if gcc := shutil.which("gcc"):
        command = [gcc, "-print-file-name=libasan.so"]
        asan = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    if not Path(asan).is_absolute():
        pytest.skip("there is no gcc with libasan")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(build.default_cache()), *FLAGS],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-3000:]
