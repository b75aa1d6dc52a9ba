"""Fixtures that end with the router's invariants."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from router_fleet import Fleet, make_served_model

from router.served_model import ServedModel


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def fleet(model: ServedModel) -> AsyncIterator[Fleet]:
    fleet = Fleet(model)
    yield fleet
    await fleet.close()
