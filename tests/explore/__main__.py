"""`python -m tests.explore`: play random schedules of the hand-over, or one of them again.

    --schedules 1000000        as many, each from the next seed (`make explore`)
    --first-seed 500000        go on where an earlier run was stopped
    --seed 4711                one schedule, with its trace
    --seed 4711 --choices ...  the world of that seed, and these steps in it

A failure is printed with the command that repeats it, after as many of its steps as are not needed were left out.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from explorer.explore import Failure, exploring, play_seed, replay, shrunk

PROGRESS_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.explore", description="Explore schedules of the hand-over.")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--transport", default="", help="of all links, in place of the seed's choice")
    parser.add_argument("--choices", type=lambda text: [int(number) for number in text.split(",")])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # what the workers say of faults is no news here
    if arguments.seed is None:
        return exploring(lambda: _many(arguments.first_seed, arguments.schedules, arguments.transport))
    return exploring(lambda: _one(arguments.seed, arguments.choices, arguments.transport))


def _many(first: int, count: int, transport: str) -> int:
    began = told = time.monotonic()
    for seed in range(first, first + count):
        failure = play_seed(seed, transport)
        if failure is not None:
            _show(seed, shrunk(failure), transport)
            return 1
        if (now := time.monotonic()) >= told + PROGRESS_S:
            told = now
            done = seed + 1 - first
            print(f"{done:,} of {count:,} schedules, {done / (now - began):.0f} a second; --first-seed {seed + 1}")
    print(f"{count:,} schedules from seed {first} on in {time.monotonic() - began:.0f} s: no invariant was broken")
    return 0


def _one(seed: int, choices: list[int] | None, transport: str) -> int:
    failure = play_seed(seed, transport) if choices is None else replay(seed, choices, transport)
    if failure is None:
        print("no invariant was broken")
        return 0
    _show(seed, failure, transport)
    return 1


def _show(seed: int, failure: Failure, transport: str) -> None:
    print(failure)
    transport = transport and f" --transport {transport}"
    print(f"python -m tests.explore --seed {seed}{transport} --choices {','.join(map(str, failure.choices or (0,)))}")


if __name__ == "__main__":
    sys.exit(main())
