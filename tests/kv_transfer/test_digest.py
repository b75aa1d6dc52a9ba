"""The copier that runs everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from kv_transfer.digest import PythonBlockCopier


def test_a_copy_s_digest_is_of_the_slot_although_the_source_has_changed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, slot = bytearray(range(200)) * 2, memoryview(bytearray(200))
    copyto = np.copyto

    def copy_then_reuse(target: Any, source: Any) -> None:
        copyto(target, source)
        pool[:] = bytes(len(pool))

    monkeypatch.setattr(np, "copyto", copy_then_reuse)
    digests = PythonBlockCopier().copy([slot], memoryview(pool), [200])

    assert bytes(slot) == bytes(range(200))
    assert digests == [xxhash.xxh3_128_digest(slot)]
