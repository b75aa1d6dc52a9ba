"""How near attention comes to the card's copy bandwidth and matrix rate, and what a decode step waits for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from bench.gpu_bench import Bench, config_of
from bench.gpu_parity import gpu_model, tables_of
from bench.report import Report
from engine.batch import ForwardBatch
from engine.kernels import attention_plan as plan
from engine.kernels import triton_paged
from engine.kernels.scoring import Scoring

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def measure_attention(report: Report, bench: Bench) -> None:
    """Decode with 32 sequences of 4k, in bfloat16 and FP8, and a prompt of 8k, with Llama-3-8B's heads."""
    num_seqs, context = (2, 40) if bench.tiny else (32, 4096)
    bandwidth, matrix_rate = _copy_bandwidth(bench), _matrix_rate(bench)
    report.figures |= {"copy_gb_per_s": bandwidth / 1e9, "matrix_tflop_per_s": matrix_rate / 1e12}
    for kv_type, suffix in ((torch.bfloat16, ""), (torch.float8_e4m3fn, "_fp8")):
        num_bytes = 2 * num_seqs * context * KV_HEADS * HEAD_DIM * kv_type.itemsize
        seconds = bench.seconds(_decode(bench, num_seqs, context, kv_type))
        report.figures[f"decode_attention_copy_share{suffix}"] = num_bytes / seconds / bandwidth
    long = _decode(bench, 1, 50 if bench.tiny else 65536, torch.bfloat16)
    long_bytes = 4 * (50 if bench.tiny else 65536) * KV_HEADS * HEAD_DIM
    report.figures["decode_attention_copy_share_1x64k"] = long_bytes / bench.seconds(long) / bandwidth
    length = 24 if bench.tiny else 8192
    operations = 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
    report.figures["prefill_attention_matrix_share"] = operations / bench.seconds(_prefill(bench, length)) / matrix_rate
    dense_bytes = 4 * num_seqs * context * KV_HEADS * HEAD_DIM
    report.peers["decode_attention_copy_share"] = (
        dense_bytes / bench.seconds(_sdpa(bench, num_seqs, context, 1)) / bandwidth
    )
    report.peers["prefill_attention_matrix_share"] = (
        operations / bench.seconds(_sdpa(bench, 1, length, length)) / matrix_rate
    )
    report.notes.append("attention: peers are torch's SDPA over contiguous KV")
    _beside_flashinfer(report, bench, num_seqs, context, bandwidth)


def _copy_bandwidth(bench: Bench) -> float:
    """Bytes per second, read and written ones together."""
    size = 1 << (16 if bench.tiny else 30)
    source, target = (torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.where) for _ in range(2))
    return 2 * size / bench.seconds(lambda _: target.copy_(source))


def _matrix_rate(bench: Bench) -> float:
    """Operations per second of a large product of random bfloat16 matrices."""
    size = 64 if bench.tiny else 8192
    a, b = (torch.randn(size, size, device=bench.where).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / bench.seconds(lambda _: a @ b)


def _pool(bench: Bench, num_blocks: int, kv_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer of a pool with random contents, and scales for codes."""
    shape = num_blocks, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM
    if kv_type != torch.float8_e4m3fn:
        return torch.randn(shape, dtype=kv_type, device=bench.where), None
    codes = torch.randint(0x08, 0x78, shape, dtype=torch.int8, device=bench.where).view(kv_type)
    return codes, torch.full((num_blocks, 2, KV_HEADS), 2.0**-7, device=bench.where)


def _decode(bench: Bench, num_seqs: int, context: int, kv_type: torch.dtype) -> Callable[[int], object]:
    blocks = -(-context // BLOCK_SIZE)
    kv, scales = _pool(bench, num_seqs * blocks, kv_type)
    tables = [torch.tensor(table) for table in tables_of(num_seqs * blocks, num_seqs)]
    part, _ = triton_paged.step_parts(tables, list(range(num_seqs + 1)), [context] * num_seqs, 1, bench.where)
    assert part is not None
    split_keys = plan.split_keys_for(context)
    partial = triton_paged.PartialResults(bench.where)
    partial.reserve(num_seqs, HEADS, plan.num_splits_for(context, None, split_keys), HEAD_DIM)
    q = torch.randn(num_seqs, HEADS, HEAD_DIM, device=bench.where).to(torch.bfloat16)
    out, arch, scoring = torch.empty_like(q), triton_paged.arch_of(bench.where), Scoring(HEAD_DIM**-0.5)
    return lambda _: triton_paged.attend_decode(q, kv, scales, part, scoring, split_keys, partial, out, arch)


def _prefill(bench: Bench, length: int) -> Callable[[int], object]:
    kv, _ = _pool(bench, -(-length // BLOCK_SIZE), torch.bfloat16)
    arch = triton_paged.arch_of(bench.where)
    group = HEADS // KV_HEADS
    queries = plan.prefill_config(HEAD_DIM, group, False, arch).rows // group
    table = torch.tensor(tables_of(len(kv), 1)[0])
    _, part = triton_paged.step_parts([table], [0, length], [length], queries, bench.where)
    assert part is not None
    q = torch.randn(length, HEADS, HEAD_DIM, device=bench.where).to(torch.bfloat16)
    out, scoring = torch.empty_like(q), Scoring(HEAD_DIM**-0.5)
    return lambda _: triton_paged.attend_prefill(q, kv, None, part, scoring, out, arch)


def _sdpa(bench: Bench, num_seqs: int, context: int, num_queries: int) -> Callable[[int], object]:
    k, v = (torch.randn(num_seqs, KV_HEADS, context, HEAD_DIM, device=bench.where).to(torch.bfloat16) for _ in "kv")
    q = torch.randn(num_seqs, HEADS, num_queries, HEAD_DIM, device=bench.where).to(torch.bfloat16)
    causal = num_queries > 1
    return lambda _: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _beside_flashinfer(report: Report, bench: Bench, num_seqs: int, context: int, bandwidth: float) -> None:
    try:
        flashinfer: Any = import_module("flashinfer")
    except ImportError:
        report.notes.append("attention: FlashInfer is not installed, so it was not compared")
        return
    blocks = context // BLOCK_SIZE
    where = bench.where
    kv = torch.randn(num_seqs * blocks, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=where).to(torch.bfloat16)
    q = torch.randn(num_seqs, HEADS, HEAD_DIM, device=where).to(torch.bfloat16)
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=where)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=where) * blocks
    indices = torch.randperm(num_seqs * blocks, device=where).to(torch.int32)
    last = torch.full((num_seqs,), BLOCK_SIZE, dtype=torch.int32, device=where)
    wrapper.plan(
        starts, indices, last, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, q_data_type=q.dtype, kv_data_type=kv.dtype
    )
    seconds = bench.seconds(lambda _: wrapper.run(q, kv))
    share = 4 * num_seqs * context * KV_HEADS * HEAD_DIM / seconds / bandwidth
    report.figures["flashinfer_decode_copy_share"] = share


def measure_graphs(report: Report, bench: Bench) -> None:
    """A decode step of 8 layers of Llama-3-8B's size with 32 sequences at 512: as a model's caller sees it.

    The overhead is the part of a step's wall time in which the card does not run the graph, logits' copy included.
    """
    num_seqs, context = (2, 20) if bench.tiny else (32, 512)
    config = config_of(1, (4, 2), 16, 48, 64) if bench.tiny else config_of(8, (32, 8), 128, 14336, 32768)
    blocks = -(-(context + 1) // BLOCK_SIZE)
    model, pool = gpu_model(
        bench, config, torch.bfloat16, num_blocks=num_seqs * blocks, max_num_seqs=num_seqs, max_model_len=1024
    )
    batch = ForwardBatch(
        token_ids=torch.zeros(num_seqs, dtype=torch.int64),
        positions=torch.full((num_seqs,), context),
        query_starts=list(range(num_seqs + 1)),
        context_lens=[context + 1] * num_seqs,
        block_tables=tables_of(num_seqs * blocks, num_seqs),
        sample_rows=list(range(num_seqs)),
    )
    wall = bench.wall_seconds(lambda: model.forward(batch, pool))
    (graph,) = model.graphs.values()
    on_card = bench.seconds(lambda _: graph())
    eager = bench.wall_seconds(lambda: model.forward_eagerly(batch, pool))
    report.figures |= {
        "decode_step_ms": 1e3 * wall,
        "decode_step_on_card_ms": 1e3 * on_card,
        "decode_step_without_graph_ms": 1e3 * eager,
        "decode_step_launch_overhead": max(0.0, 1 - on_card / wall),
    }
    pool.close()
