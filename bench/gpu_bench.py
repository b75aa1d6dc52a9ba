"""Where `bench.gpu_check` runs: a card, or for a rehearsal the CPU; how it times; models with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.config import ModelConfig
from engine.cuda.device import CudaDevice, Device
from engine.cuda.rehearsal import HostDevice
from engine.model.decoder import DecoderWeights

_RUNS = 30
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Bench:
    device: Device
    tiny: bool
    """A rehearsal: shapes that the interpreter gets through in seconds."""

    @classmethod
    def on_card(cls) -> Bench:
        return cls(CudaDevice(0), tiny=False)

    @classmethod
    def on_cpu(cls) -> Bench:
        return cls(HostDevice(), tiny=True)

    def open(self, name: str) -> Device:
        """One more handle of the same card, as a worker of its own has."""
        return HostDevice() if self.tiny else CudaDevice(0)

    @property
    def where(self) -> torch.device:
        return self.device.torch_device

    def seconds(self, run: Callable[[int], object]) -> float:
        """Median time on the device of one call; the argument counts calls, so that inputs can be rotated."""
        if self.tiny:
            began = time.perf_counter()
            run(0)
            return time.perf_counter() - began
        for number in range(_WARM_UP):
            run(number)
        times: list[float] = []
        cuda: Any = torch.cuda
        for number in range(_RUNS):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            run(number)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def wall_seconds(self, run: Callable[[], object]) -> float:
        """Median time of one call that waits for its own result."""
        for _ in range(1 if self.tiny else _WARM_UP):
            run()
        times = []
        for _ in range(1 if self.tiny else _RUNS):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def config_of(num_layers: int, heads: tuple[int, int], head_dim: int, intermediate: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=heads[0] * head_dim,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        max_model_len=8192,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        eos_token_ids=(0,),
        bos_token_id=None,
        qk_norm=True,
    )


def random_weights(config: ModelConfig, dtype: torch.dtype, where: torch.device, seed: int = 0) -> DecoderWeights:
    """Scaled so that attention and logits are far from uniform; the same numbers, rounded to `dtype`, anywhere."""
    weights = DecoderWeights(config, dtype, str(where))
    generator = torch.Generator().manual_seed(seed)
    for name, part in weights.parts().items():
        if "norm" in name:
            values = torch.rand(part.shape, generator=generator) + 0.5
        else:
            values = torch.randn(part.shape, generator=generator) * (1.5 / part.shape[-1] ** 0.5)
        part.copy_(values)
    return weights
