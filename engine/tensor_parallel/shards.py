"""Which part of each weight a rank has. Pure: names and shapes.

Queries, keys, values, gate and up are cut by outputs, attention's output and down by inputs: between the two a rank
needs nothing of the others, and what the second gives is a part of the sum over all ranks. All else is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config import ModelConfig
from engine.errors import ConfigError

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int
    size: int
    """Ranks in all."""

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of a rank's part of the model, which is a model with fewer heads and a smaller inner size."""
        check_shards(config, self.size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=config.num_kv_heads // self.size,
            intermediate_size=config.intermediate_size // self.size,
        )

    def cut(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of the checkpoint's tensor `name`, as a view; one that cannot be cut evenly comes whole."""
        module = name.split(".")[-2] if "." in name else ""
        if module in _BY_OUTPUTS:
            dim = 0
        elif module in _BY_INPUTS and tensor.dim() == 2:
            dim = 1
        else:
            return tensor
        part, rest = divmod(tensor.shape[dim], self.size)
        return tensor if rest else tensor.narrow(dim, self.rank * part, part)


def check_shards(config: ModelConfig, size: int) -> None:
    """Raises `ConfigError` if `size` ranks cannot have equal shares."""
    for name in ("num_kv_heads", "intermediate_size"):
        value = getattr(config, name)
        if value % size:
            raise ConfigError(f"tensor_parallel_size {size} does not divide the model's {name} {value}")
