from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from http_front import HttpFront

from router.served_model import ServedModel


@pytest.fixture
async def front(model: ServedModel) -> AsyncIterator[HttpFront]:
    front = HttpFront(model)
    yield front
    await front.close()
