"""The folder of the real model, for tests marked `model`. Kept between runs, because making it takes seconds."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from engine.model_store import resolve_model


def model_cache_dir() -> Path:
    """The user's cache, or the temporary folder where that cannot be written."""
    cache_dir = Path.home() / ".cache" / "kvrelay" / "models"
    with suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
    return cache_dir if os.access(cache_dir, os.W_OK) else Path(tempfile.gettempdir()) / "kvrelay-models"


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct, ready to load. Read-only."""
    return resolve_model("smollm2-135m", model_cache_dir())
