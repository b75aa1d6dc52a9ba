"""Prompts as paths in a tree, with keys that are a function of the path, for tests of the router's prefix index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b

Path = tuple[int, ...]


def key_of(path: Path) -> int:
    """As short as a routing key is."""
    return int.from_bytes(blake2b(bytes(path), digest_size=8).digest()) >> 4


def prefixes(path: Path) -> list[Path]:
    return [path[:n] for n in range(1, len(path) + 1)]


def keys_of(paths: Iterable[Path]) -> list[int]:
    return [key_of(path) for path in paths]


class PathKeys:
    """The keys of one prompt. Counts those that were asked for."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.num_probed = 0

    def __len__(self) -> int:
        return len(self._path)

    def prober(self) -> Callable[[int], int]:
        def short(num_blocks: int) -> int:
            assert 1 <= num_blocks <= len(self._path)
            self.num_probed += 1
            return key_of(self._path[:num_blocks])

        return short
