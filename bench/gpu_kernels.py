"""Every Triton kernel on the device at hand: attention against float64, the rest against what CPUs compute."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from bench.gpu_bench import Bench
from bench.report import Report
from engine.cuda.memory import CudaKvCache
from engine.cuda.sampling import CardSampler
from engine.kernels import reference, triton_kv, triton_layers, triton_paged, triton_sampling
from engine.kernels.scoring import Scoring
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model import layers
from engine.sampler import SampleRow, sample, uniform
from engine.sampling_params import SamplingParams

LIMITS = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
"""Of the norm of the difference relative to that of the result. Matrix units round 16-bit weights of the softmax."""
BLOCK_SIZE = 16


def check(report: Report, bench: Bench) -> None:
    """Figures: `kernel_checks`, `kernel_checks_failed`, and the largest error relative to its limit."""
    torch.manual_seed(0)
    failed, worst, total = [], 0.0, 0
    for name, error in _errors(bench):
        total += 1
        worst = max(worst, error) if error == error else float("inf")
        if not error <= 1.0:
            failed.append(f"{name}: {error:.3g} of its limit")
    report.figures |= {
        "kernel_checks": total,
        "kernel_checks_failed": len(failed),
        "kernel_worst_error_to_limit": worst,
    }
    report.notes += [f"kernels: {line}" for line in failed]


def _errors(bench: Bench) -> Iterator[tuple[str, float]]:
    """Name of each check, and its error as a part of what it may be."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kv_types = (None, "fp8_e4m3", "int8")
        for kv_dtype in kv_types:
            for scoring in (Scoring(0.1), Scoring(0.1, window=40, soft_cap=5.0)):
                for heads, head_dim in ((9, 3), 64), ((32, 8), 128), ((8, 4), 256), ((4, 4), 96):
                    if bench.tiny and (dtype != torch.float16 or head_dim != 64):
                        continue
                    if dtype == torch.float32 and head_dim > 64:
                        continue  # tiles are made for 16 bits: these would not fit into shared memory
                    name = f"attention {dtype} KV {kv_dtype} heads {heads} of {head_dim} {scoring}"
                    yield from attention_errors(name, bench, dtype, kv_dtype, heads, head_dim, scoring)
        yield from _layer_errors(bench, dtype)
    yield from _copy_errors(bench)
    yield from _sampling_errors(bench)


def attention_errors(
    name: str,
    bench: Bench,
    dtype: torch.dtype,
    kv_dtype: str | None,
    heads: tuple[int, int],
    head_dim: int,
    scoring: Scoring,
) -> Iterator[tuple[str, float]]:
    """Store and attention over scattered blocks of a poisoned pool: contexts of all kinds in one batch."""
    context_lens, query_lens = (
        ([1, 20, 30], [1, 1, 5]) if bench.tiny else ([1, 700, 2500, 300, 1025], [1, 1, 1, 300, 3])
    )
    layout = KvLayout(
        num_layers=2,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        dtype=kv_dtype or str(dtype).removeprefix("torch."),
    )
    sizes = [-(-length // BLOCK_SIZE) for length in context_lens]
    ours = CudaKvCache(layout, sum(sizes) + 2, bench.device)
    theirs = KvCache(layout, sum(sizes) + 2)
    if ours.scales is None:
        ours.pool.fill_(torch.nan)
        theirs.pool.fill_(torch.nan)
    free = random.Random(0).sample(range(ours.num_blocks), sum(sizes))
    tables = [torch.tensor([free.pop() for _ in range(size)]) for size in sizes]
    for table, length in zip(tables, context_lens, strict=True):
        k, v = torch.randn(2, length, heads[1], head_dim).to(dtype)
        positions = torch.arange(length)
        slots = table[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        reference.store_kv(k, v, theirs.pool, 1, *slots, theirs.scales)
        k, v, blocks, offsets = (tensor.to(bench.where) for tensor in (k, v, *slots))
        triton_kv.store_kv(k, v, ours.pool, 1, blocks, offsets, ours.scales)
    same = torch.equal(ours.by_block.cpu(), torch.stack([_block_bytes(theirs, b) for b in range(theirs.num_blocks)]))
    yield f"store, {name}", 0.0 if same else float("inf")
    starts = [sum(query_lens[:s]) for s in range(len(query_lens) + 1)]
    q = torch.randn(starts[-1], heads[0], head_dim).to(dtype)
    result = triton_paged.paged_attention(
        q.to(bench.where), ours.pool, 1, tables, starts, context_lens, scoring, ours.scales
    )
    expected = _dense(q, theirs, tables, starts, context_lens, scoring)
    yield name, _relative(result, expected) / LIMITS[dtype]
    theirs.close()
    ours.close()


def _dense(
    q: torch.Tensor,  # [T, heads, head_dim]
    kv: KvCache,
    tables: Sequence[torch.Tensor],
    starts: Sequence[int],
    context_lens: Sequence[int],
    scoring: Scoring,
) -> torch.Tensor:  # [T, heads, head_dim] float64
    """Of what the pool holds in layer 1, from its bytes, with the whole matrix of scores."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for table, start, end, length in zip(tables, starts, starts[1:], context_lens, strict=False):
        values = kv.pool[table, 1].double()  # [n, 2, kv_heads, block_size, head_dim]
        if kv.scales is not None:
            middle = 0.5 if kv.layout.dtype == "int8" else 0.0
            values = (values + middle) * kv.scales[table, 1].double()[..., None, None]
        both = values.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]  # [2, kv_heads, length, head_dim]
        k, v = both.repeat_interleave(q.shape[1] // both.shape[1], dim=1)
        scores = torch.einsum("qhd,hnd->hqn", q[start:end].double(), k) * scoring.scale
        if scoring.soft_cap is not None:
            scores = scoring.soft_cap * (scores / scoring.soft_cap).tanh()
        back = torch.arange(length - (end - start), length)[:, None] - torch.arange(length)
        hidden = (back < 0) if scoring.window is None else (back < 0) | (back >= scoring.window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[start:end] = torch.einsum("hqn,hnd->qhd", weights, v)
    return out


def _layer_errors(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    rows, hidden = (2, 96) if bench.tiny else (65, 4096)
    residual, delta, weight = (
        torch.randn(rows, hidden),
        torch.randn(rows, hidden).to(dtype),
        torch.rand(hidden).to(dtype),
    )
    summed, out = (
        residual.to(bench.where, copy=True),
        torch.full((rows, hidden), torch.nan, dtype=dtype, device=bench.where),
    )
    triton_layers.add_norm(summed, delta.to(bench.where), weight.to(bench.where), 1e-5, out)
    yield f"norm {dtype}", _relative(out, layers.rms_norm(residual + delta.float(), weight, 1e-5)) / LIMITS[dtype]
    yield f"residual {dtype}", _relative(summed, residual + delta.float()) / 1e-6
    gate_up = torch.randn(rows, 2 * hidden).to(dtype)
    for gelu, expected in (
        (False, layers.silu_and_mul(gate_up.float())),
        (True, layers.gelu_tanh_and_mul(gate_up.float())),
    ):
        gated = torch.full((rows, hidden), torch.nan, dtype=dtype, device=bench.where)
        triton_layers.gate(gate_up.to(bench.where), gated, gelu)
        yield f"gate {dtype} gelu {gelu}", _relative(gated, expected) / LIMITS[dtype]
    frequencies = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    positions, angles = torch.arange(rows), torch.arange(rows).unsqueeze(-1) * frequencies
    table = torch.stack((angles.cos(), angles.sin()), dim=1).float()
    qk = torch.randn(rows, 4, 64).to(dtype)
    rotated = qk.to(bench.where, copy=True)
    triton_layers.rotate_in_place(rotated, positions.to(bench.where), table.to(bench.where), 3)
    expected = layers.rotate(qk, *layers.rotation(positions, frequencies))
    yield f"rotation {dtype}", _relative(rotated, expected) / LIMITS[dtype]


def _copy_errors(bench: Bench) -> Iterator[tuple[str, float]]:
    pool = torch.randint(0, 255, (40, 8192 + 64), dtype=torch.uint8)
    ids, into = torch.randperm(40)[:10], torch.randperm(10)
    staging = torch.zeros(10, pool.shape[1], dtype=torch.uint8, device=bench.where)
    triton_kv.copy_blocks(pool.to(bench.where), staging, ids.to(bench.where), into.to(bench.where))
    expected = torch.zeros_like(staging, device="cpu")
    expected[into] = pool[ids]
    yield "block copy", 0.0 if torch.equal(staging.cpu(), expected) else float("inf")


def _sampling_errors(bench: Bench) -> Iterator[tuple[str, float]]:
    rng, rows, vocab = random.Random(0), 4 if bench.tiny else 64, 40 if bench.tiny else 50000
    seeds = [rng.getrandbits(64) for _ in range(rows)]
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds], device=bench.where)
    positions = torch.arange(rows, device=bench.where) + 2**32 - 2
    numbers = torch.zeros(rows, dtype=torch.float64, device=bench.where)
    triton_sampling.uniform_kernel[(rows,)](signed, positions, numbers)
    expected = [uniform(seed, position) for seed, position in zip(seeds, positions.tolist(), strict=True)]
    yield "random bits", 0.0 if numbers.tolist() == expected else float("inf")
    logits = 2 * torch.randn(rows, vocab)
    tokens = [rng.randrange(vocab) for _ in range(12)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.8]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, -0.4]),
            logit_bias=rng.choice([(), ((tokens[0], 5.0), (tokens[5], -3.0))]),
            logprobs=rng.choice([None, 3]),
            seed=seed,
        )
        for seed in seeds
    ]
    sampled = [
        SampleRow(each, position, tuple(tokens[:2]), tokens[:6], tokens[4:])
        for each, position in zip(params, positions.tolist(), strict=True)
    ]
    wanted = sample(logits, sampled)
    drawn = CardSampler(bench.device).sample(logits.to(bench.where), sampled)
    differing = sum(ours != theirs for ours, theirs in zip(drawn, wanted, strict=True))
    yield f"sampling: {differing} of {rows} tokens or logprobs differ", float("inf") if differing else 0.0


def _block_bytes(kv: KvCache, block: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(kv.block(block)), dtype=torch.uint8)


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    difference = ours.double().cpu() - theirs.double()
    return float(difference.norm() / theirs.double().norm())
