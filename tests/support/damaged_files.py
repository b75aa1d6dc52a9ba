"""Small files of models, and ways to damage them."""

from __future__ import annotations

import json
from pathlib import Path


def safetensors(data: bytes) -> bytes:
    """The content of a file with one tensor that holds `data`."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


def cut(path: Path) -> None:
    """Lose the second half."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
