"""Fixtures of the link tests. Their ends check the integrity of table and sender."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_links import TRANSPORTS
from kv_wire import Wire, open_wire


@pytest.fixture(params=TRANSPORTS)
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    with open_wire(request.param) as opened:
        yield opened
