"""The GPU's decoder with Triton's interpreter, its graphs with a stand-in: against the decoder for CPUs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from gpu_stand_in import StandIn
from tiny_llama import TINY, random_tensors

from engine.batch import ForwardBatch
from engine.config import LocalLayers, ModelConfig
from engine.cuda.decoder import GpuDecoder
from engine.cuda.memory import CudaKvCache
from engine.cuda.model import GpuModel
from engine.cuda.plan import GraphKey
from engine.errors import InternalError
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderModel, DecoderWeights

BLOCK_SIZE = 8
QWEN3 = replace(TINY, qk_norm=True, qkv_bias=True, tie_word_embeddings=False)
GEMMA3 = replace(
    TINY,
    qk_norm=True,
    post_norms=True,
    norm_offset=1.0,
    activation="gelu_tanh",
    scale_embedding=True,
    final_soft_cap=20.0,
    local=LocalLayers(window=10, layers=(0,), rope_theta=500.0),
)
FAMILIES = {"llama": TINY, "qwen3": QWEN3, "gemma3": GEMMA3}


class Pair:
    """The same weights and the same blocks, for both decoders."""

    def __init__(self, config: ModelConfig, kv_dtype: str = "float32") -> None:
        self.weights = DecoderWeights(config, torch.float32)
        tensors = random_tensors(config)
        for name, part in self.weights.parts().items():
            part.copy_(torch.from_numpy(tensors[name]))
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype=kv_dtype,
        )
        self.device = StandIn()
        self.kv = CudaKvCache(layout, 24, self.device)
        self.host_kv = KvCache(layout, 24)
        decoder = GpuDecoder(config, self.weights, max_context_len=128, max_num_seqs=4)
        self.model = GpuModel(decoder, self.kv, self.device, max_num_seqs=4, max_model_len=128)
        self.oracle = DecoderModel(config, self.weights)
        blocks = random.Random(0).sample(range(24), 24)
        self.tables = [blocks[i : i + 5] for i in range(0, 20, 5)]

    def step(self, *parts: tuple[int, int], samples: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `begin` to `end` of sequence 0, 1, ... through both; (0, 0) leaves a sequence out."""
        rows = [(table, begin, end) for table, (begin, end) in zip(self.tables, parts, strict=False) if end]
        starts = [0]
        for _, begin, end in rows:
            starts.append(starts[-1] + end - begin)
        positions = torch.cat([torch.arange(begin, end) for _, begin, end in rows])
        batch = ForwardBatch(
            token_ids=(positions * 7 + 3) % 97,
            positions=positions,
            query_starts=starts,
            context_lens=[end for _, _, end in rows],
            block_tables=[table for table, _, _ in rows],
            sample_rows=[start - 1 for start in starts[1:]] if samples else [],
        )
        return self.model.forward(batch, self.kv).clone(), self.oracle.forward(batch, self.host_kv)

    def check_step(self, *parts: tuple[int, int], tolerance: float = 2e-4) -> None:
        ours, theirs = self.step(*parts)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "family",
    [pytest.param("llama", marks=pytest.mark.slow), pytest.param("qwen3", marks=pytest.mark.slow), "gemma3"],
)
def test_prompts_chunks_and_decode_steps_give_the_logits_of_the_decoder_for_cpus(family: str) -> None:
    pair = Pair(FAMILIES[family])
    pair.check_step((0, 11), (0, 1))
    pair.check_step((11, 12), (1, 4))
    pair.check_step((12, 13), (4, 5))
    assert pair.device.calls.count("replay") == 1


def test_a_graph_serves_every_step_that_fits_it_with_other_sequences_and_lengths() -> None:
    pair = Pair(TINY)
    pair.step((0, 2), (0, 9), (0, 1))
    for parts in (((2, 3), (9, 10), (1, 2)), ((0, 0), (10, 11), (2, 3)), ((3, 4), (11, 12), (3, 4))):
        pair.check_step(*parts)
    assert set(pair.model.graphs) == {GraphKey(4, 1), GraphKey(2, 1)}
    assert pair.device.calls.count("capture") == 2


def test_rows_that_are_none_leave_the_pool_alone() -> None:
    pair = Pair(TINY)
    pair.step((0, 1), (0, 8), (0, 1))
    before = pair.kv.by_block.clone()
    pair.step((1, 2), (8, 9), (1, 2))  # three rows of four
    changed = (pair.kv.by_block != before).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted([pair.tables[0][0], pair.tables[1][1], pair.tables[2][0]])


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_quantized_kv(kv_dtype: str) -> None:
    pair = Pair(TINY, kv_dtype)
    pair.check_step((0, 9), tolerance=5e-2)
    pair.check_step((9, 10), tolerance=5e-2)


def test_a_decode_step_is_one_upload_one_replay_and_one_download() -> None:
    pair = Pair(TINY)
    pair.step((0, 1))
    pair.device.calls.clear()
    pair.step((1, 2))
    upload, *others = pair.device.calls
    assert upload.startswith("upload ")
    assert others == ["replay", "mark", "download"]


def test_a_chunk_that_draws_nothing_waits_for_nothing() -> None:
    pair = Pair(TINY)
    ours, _ = pair.step((0, 2), samples=False)
    assert ours.shape == (0, TINY.vocab_size)
    assert pair.device.calls == ["mark"]


def test_a_sequence_that_does_not_fit_the_buffers_is_refused_before_anything_is_copied() -> None:
    pair = Pair(TINY)
    pair.tables[0] = list(range(20))
    with pytest.raises(InternalError, match="17 blocks"):
        pair.step((128, 129))
    assert pair.device.calls == []


def test_a_decode_step_that_draws_nothing_takes_no_graph_as_nobody_would_wait_for_its_inputs() -> None:
    pair = Pair(TINY)
    pair.step((0, 1), samples=False)
    assert pair.device.calls == ["mark"]


def test_logits_of_more_tokens_than_sequences_are_all_given() -> None:
    pair = Pair(TINY)
    batch = ForwardBatch(
        token_ids=torch.arange(5),
        positions=torch.arange(5),
        query_starts=[0, 5],
        context_lens=[5],
        block_tables=[pair.tables[0]],
        sample_rows=[0, 1, 2, 3, 4],
    )
    ours, theirs = pair.model.forward(batch, pair.kv), pair.oracle.forward(batch, pair.host_kv)
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
