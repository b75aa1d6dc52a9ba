"""A model with random weights on the device at hand against the CPU's in float32: prompts, chunks, decode steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from bench.gpu_bench import Bench, config_of, random_weights
from bench.report import Report
from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.cuda.decoder import GpuDecoder
from engine.cuda.memory import CudaKvCache
from engine.cuda.model import GpuModel
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderModel, Model

BLOCK_SIZE = 16


def check(report: Report, bench: Bench) -> None:
    """Figures: `parity_tokens`, `parity_tokens_differing` (float32), and the error of logits in bfloat16."""
    lengths, new_tokens = ([3, 5], 2) if bench.tiny else ([1, 63, 500, 130], 32)
    config = config_of(1, (4, 2), 16, 48, 64) if bench.tiny else config_of(6, (9, 3), 64, 1536, 8192)
    prompts = [[random.Random(s).randrange(config.vocab_size) for _ in range(n)] for s, n in enumerate(lengths)]
    oracle = DecoderModel(config, random_weights(config, torch.float32, torch.device("cpu")))
    kv = KvCache(layout_of(config, torch.float32), 256)
    expected, reference_logits = generate(oracle, kv, prompts, new_tokens)
    kv.close()
    differing, errors = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model, pool = gpu_model(bench, config, dtype, num_blocks=256, max_num_seqs=len(prompts), max_model_len=1024)
        tokens, logits = generate(model, pool, prompts, new_tokens, follow=expected)
        differing[dtype] = sum(
            a != b for ours, theirs in zip(tokens, expected, strict=True) for a, b in zip(ours, theirs, strict=True)
        )
        errors[dtype] = float((logits - reference_logits).norm() / reference_logits.norm())
        pool.close()
    report.figures |= {
        "parity_tokens": sum(map(len, expected)),
        "parity_tokens_differing": differing[torch.float32],
        "parity_tokens_differing_bfloat16": differing[torch.bfloat16],
        "parity_logits_error_float32": errors[torch.float32],
        "parity_logits_error_bfloat16": errors[torch.bfloat16],
    }


def gpu_model(
    bench: Bench, config: ModelConfig, dtype: torch.dtype, *, num_blocks: int, max_num_seqs: int, max_model_len: int
) -> tuple[GpuModel, CudaKvCache]:
    weights = random_weights(config, dtype, bench.where)
    pool = CudaKvCache(layout_of(config, dtype), num_blocks, bench.device, num_host_blocks=8)
    decoder = GpuDecoder(config, weights, max_model_len, max_num_seqs)
    return GpuModel(decoder, pool, bench.device, max_num_seqs, max_model_len), pool


def layout_of(config: ModelConfig, dtype: torch.dtype) -> KvLayout:
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=str(dtype).removeprefix("torch."),
    )


def tables_of(num_blocks: int, num_seqs: int) -> list[list[int]]:
    """Scattered blocks of equal shares of a pool."""
    blocks = random.Random(1).sample(range(num_blocks), num_blocks)
    share = num_blocks // num_seqs
    return [blocks[s * share : (s + 1) * share] for s in range(num_seqs)]


def generate(
    model: Model,
    kv: KvCache,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    follow: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of each prompt, and all logits: [steps * S, vocab] float32.

    Prompts longer than two tokens come in two chunks. With `follow`, these tokens are taken as context instead of
    those that were drawn, so one that differs does not change what follows.
    """
    tables = tables_of(kv.num_blocks, len(prompts))
    halves = [len(prompt) // 2 for prompt in prompts]
    if any(halves):
        parts = [(s, prompt, 0, half) for s, (prompt, half) in enumerate(zip(prompts, halves, strict=True)) if half]
        step(model, kv, tables, parts)
    logits = [step(model, kv, tables, [(s, p, halves[s], len(p)) for s, p in enumerate(prompts)])]
    drawn = [[token] for token in logits[-1].argmax(dim=-1).tolist()]
    for number in range(1, num_tokens):
        context = follow or drawn
        sequences = [[*prompt, *context[s][:number]] for s, prompt in enumerate(prompts)]
        logits.append(step(model, kv, tables, [(s, seq, len(seq) - 1, len(seq)) for s, seq in enumerate(sequences)]))
        for tokens, token in zip(drawn, logits[-1].argmax(dim=-1).tolist(), strict=True):
            tokens.append(token)
    return drawn, torch.cat(logits)


def step(
    model: Model, kv: KvCache, tables: Sequence[list[int]], parts: Sequence[tuple[int, Sequence[int], int, int]]
) -> torch.Tensor:
    """Compute tokens `begin` to `end` of each (table, tokens, begin, end). Returns the logits of the last of each."""
    starts = [0]
    for _, _, begin, end in parts:
        starts.append(starts[-1] + end - begin)
    batch = ForwardBatch(
        token_ids=torch.tensor([token for _, tokens, begin, end in parts for token in tokens[begin:end]]),
        positions=torch.cat([torch.arange(begin, end) for _, _, begin, end in parts]),
        query_starts=starts,
        context_lens=[end for _, _, _, end in parts],
        block_tables=[tables[s] for s, _, _, _ in parts],
        sample_rows=[start - 1 for start in starts[1:]],
    )
    return model.forward(batch, kv).clone()
