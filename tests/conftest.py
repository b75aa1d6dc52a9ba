"""Fixtures of more than one package's tests. Those with blocks end by checking that none was lost."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from factories import HarnessFactory
from model_fixture import smollm2_folder as smollm2_folder
from scheduler_model import PolicyFactory


def pytest_configure() -> None:
    """Triton decides when it is imported whether kernels run in its interpreter: here always, with a GPU or without."""
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the suite runs in several processes, fixtures of a file are set up once, and there is one Ray cluster."""
    for item in items:
        path = item.path.relative_to(item.config.rootpath)
        if path.is_relative_to("tests/explore"):
            continue  # minutes, of parts that share nothing
        starts_ray = path.is_relative_to("tests/cluster") and item.get_closest_marker("processes") is not None
        item.add_marker(pytest.mark.xdist_group("ray" if starts_ray else str(path)))


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """The tests share few cores, and tiny tensors gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture
def make_engine() -> Iterator[HarnessFactory]:
    """Builds small engines around the fake model; see `factories.EngineHarness`."""
    factory = HarnessFactory()
    yield factory
    factory.close()


@pytest.fixture
def make_policy() -> Iterator[PolicyFactory]:
    """Builds schedulers that nobody computes for; see `scheduler_model.Policy`."""
    factory = PolicyFactory()
    yield factory
    factory.close()
