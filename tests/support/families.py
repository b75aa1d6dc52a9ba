"""Tiny random models of each family, and what Hugging Face transformers computes with them: `tests/data/families`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

_FOLDER = Path(__file__).parents[1] / "data" / "families"
FAMILIES = sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


@dataclass(frozen=True, slots=True)
class Family:
    config: dict[str, Any]
    """The config.json that transformers wrote."""
    tensors: dict[str, torch.Tensor]
    """bfloat16, under Hugging Face's names."""
    token_ids: list[int]
    logits: torch.Tensor  # [T, vocab] float32, after each of token_ids
    num_prompt: int
    greedy: list[int]
    """What follows the first `num_prompt` of token_ids."""

    def write(self, folder: Path, num_files: int = 1) -> Path:
        """A model folder in Hugging Face's layout, with the weights in so many files."""
        (folder / "config.json").write_text(json.dumps(self.config))
        if num_files == 1:
            save_file(self.tensors, folder / "model.safetensors")
            return folder
        names = sorted(self.tensors)
        places: dict[str, str] = {}
        for i in range(num_files):
            file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
            places |= dict.fromkeys(names[i::num_files], file)
            save_file({name: self.tensors[name] for name in names[i::num_files]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return folder


@cache
def load_family(name: str) -> Family:
    with safe_open(_FOLDER / f"{name}.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    token_ids, logits, greedy = (tensors.pop(f"golden.{part}") for part in ("token_ids", "logits", "greedy"))
    return Family(
        json.loads(metadata["config"]),
        tensors,
        token_ids.tolist(),
        logits,
        int(metadata["num_prompt"]),
        greedy.tolist(),
    )
