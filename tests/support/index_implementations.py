"""Both implementations of the router's prefix index."""

from __future__ import annotations

from functools import cache

from engine.native.build import default_cache
from router.native.index import NativeIndex, NativeLibrary, load_library
from router.prefix_index import PrefixIndex
from router.reference_index import ReferenceIndex

IMPLEMENTATIONS = (ReferenceIndex, NativeIndex)


@cache
def library() -> NativeLibrary:
    return load_library(default_cache())


def make(implementation: type[PrefixIndex], max_bytes: int, speculation_s: float = 10.0) -> PrefixIndex:
    if implementation is NativeIndex:
        return NativeIndex(library(), max_bytes, speculation_s)
    return ReferenceIndex(max_bytes, speculation_s)
