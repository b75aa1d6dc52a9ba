from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from roles import Router, check_nothing_left, make_config, make_parts

from decode_worker.worker import DecodeWorker


@pytest.fixture
async def worker() -> AsyncIterator[DecodeWorker]:
    worker = DecodeWorker(make_config(), make_parts())
    await worker.start()
    yield worker
    await check_nothing_left(worker)
    await worker.stop()


@pytest.fixture
async def router(worker: DecodeWorker) -> Router:
    return Router(worker)
