"""Recorded requests: when each came, how long it was, and, where that is known, which begin alike."""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.report import REPOSITORY

MOONCAKE_BLOCK = 512
NAMED = {
    "mooncake_conversation": REPOSITORY / "bench/data/mooncake_fast25/conversation_trace_first_half.jsonl.gz",
    "azure_conversation": REPOSITORY / "bench/data/azure_llm_2023/conversation_lengths.csv.gz",
}
AZURE_RATE = 5.4
"""Requests a second: 19,366 of an hour. The lengths in the repository have no time stamps."""
SERVEGEN_TOKENS, SERVEGEN_WINDOW_S = (2000, 300), 600.0
"""Assumed prompt and output: that file has rates only."""


@dataclass(frozen=True, slots=True)
class Recorded:
    at_s: float
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...]
    """One for each full block of `MOONCAKE_BLOCK` tokens, equal for equal prefixes; where nothing is known, all differ.
    """

    @property
    def num_blocks(self) -> int:
        return -(-self.num_prompt // MOONCAKE_BLOCK)


def read_trace(name: str, seed: int = 1) -> list[Recorded]:
    """`name`: one of `NAMED`, or a file in Mooncake's, Azure's or ServeGen's format. Raises `ValueError` for others."""
    path = NAMED.get(name, Path(name))
    rng = random.Random(seed)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="") as file:
        first = file.readline()
        file.seek(0)
        if first.startswith("{"):
            found = list(_mooncake(file))
        elif first.startswith("context_tokens") or first.startswith("TIMESTAMP"):
            found = list(_azure(file, rng))
        elif len(first.split(",")) >= 5:
            found = list(_servegen(file, rng))
        else:
            raise ValueError(f"{path} is no trace of Mooncake, Azure or ServeGen: {first[:40]!r}")
    return sorted(found, key=lambda recorded: recorded.at_s)


def _mooncake(file: IO[str]) -> Iterator[Recorded]:
    for line in file:
        entry = json.loads(line)
        full = entry["input_length"] // MOONCAKE_BLOCK
        ids = tuple(entry["hash_ids"][:full])
        yield Recorded(entry["timestamp"] / 1000, entry["input_length"], entry["output_length"], ids)


def _azure(file: IO[str], rng: random.Random) -> Iterator[Recorded]:
    began, at_s = None, 0.0
    for row in csv.DictReader(file):
        if "TIMESTAMP" in row:
            stamp = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            began = began or stamp
            at_s = (stamp - began).total_seconds()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        else:
            at_s += rng.expovariate(AZURE_RATE)
            prompt, output = int(row["context_tokens"]), int(row["generated_tokens"])
        yield Recorded(at_s, prompt, output, _fresh(prompt, rng))


def _servegen(file: IO[str], rng: random.Random) -> Iterator[Recorded]:
    """The first hour of a table of client, second, rate, ...: as many requests in each window as its rate says."""
    for row in csv.reader(file):
        start, rate = float(row[1]), float(row[2])
        if start < 6 * SERVEGEN_WINDOW_S:
            at_s = start + rng.expovariate(rate)
            while at_s < start + SERVEGEN_WINDOW_S:
                prompt, output = SERVEGEN_TOKENS
                yield Recorded(at_s, prompt, output, _fresh(prompt, rng))
                at_s += rng.expovariate(rate)


def _fresh(num_prompt: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.getrandbits(59) for _ in range(num_prompt // MOONCAKE_BLOCK))
