from __future__ import annotations

import pytest
import torch
from gpu_stand_in import StandIn
from tiny_llama import TINY, random_tensors

from engine.cuda.build import GpuLimits, build_gpu_model
from engine.cuda.memory import CudaKvCache
from engine.cuda.plan import decode_step_bytes
from engine.errors import ConfigError
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderWeights

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32")


def load(weights: DecoderWeights) -> None:
    tensors = random_tensors(TINY)
    for name, part in weights.parts().items():
        part.copy_(torch.from_numpy(tensors[name]))


def build(device: StandIn, gpu_memory_utilization: float) -> CudaKvCache:
    limits = GpuLimits(
        max_num_seqs=1, max_num_batched_tokens=3, max_model_len=16, gpu_memory_utilization=gpu_memory_utilization
    )
    _, kv = build_gpu_model(TINY, load, torch.float32, LAYOUT, limits, device)
    return kv


def test_the_pool_is_what_others_weights_the_largest_step_and_graphs_leave() -> None:
    device = StandIn()
    kv = build(device, 0.9)
    probe = LAYOUT.block_bytes  # three tokens need a block, which the measured peak includes
    left = 900_000 - 100_000 - (300_000 - probe) - decode_step_bytes(TINY, 1, 4)
    assert kv.num_blocks == left // LAYOUT.block_bytes
    assert device.calls.count("measure") == 1


def test_a_card_that_holds_no_block_is_refused_by_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization 0\.3 "):
        build(StandIn(), 0.3)


def test_graphs_are_given_more_than_their_logits_and_activations_take() -> None:
    assert decode_step_bytes(TINY, 8, 2) == 8 * decode_step_bytes(TINY, 1, 2)
    assert decode_step_bytes(TINY, 1, 2) > 4 * TINY.vocab_size + 2 * 3 * TINY.intermediate_size


def test_everything_that_a_step_reads_is_on_the_card() -> None:
    device = StandIn()
    device.torch_device = torch.device("meta")
    limits = GpuLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, num_blocks=4)
    kept: list[DecoderWeights] = []

    model, kv = build_gpu_model(TINY, kept.append, torch.bfloat16, LAYOUT, limits, device)

    decoder, (weights,) = model._decoder, kept
    read = [*weights.parts().values(), decoder._rotations, decoder._partial.values, kv.by_block]
    read += [model._inputs.field(name, 1) for name in ("token_ids", "block_tables")]
    assert {tensor.device.type for tensor in read} == {"meta"}
