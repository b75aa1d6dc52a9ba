"""The recorded outputs of SmolLM2 from llama.cpp; see `tests/data/smollm2_golden/SOURCE.md`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[1] / "data" / "smollm2_golden"


def golden_records() -> list[dict[str, Any]]:
    """All records: those of conversations have `messages`, those of plain prompts have `prompt`."""
    records = []
    for name in ("golden_chat.jsonl.gz", "golden_completion.jsonl.gz"):
        with gzip.open(_FOLDER / name, "rt", encoding="utf-8") as lines:
            records += [json.loads(line) for line in lines]
    return records
