"""Scattered blocks from one pool on the card to another, by our kernel, against a plain copy of as many bytes."""

from __future__ import annotations

import torch

from bench.gpu_bench import Bench
from bench.report import Report
from engine.kernels import triton_kv


def check(report: Report, bench: Bench) -> None:
    num_blocks, block_bytes = (6, 4096) if bench.tiny else (512, 1 << 21)
    source, target = (
        torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8, device=bench.where) for _ in range(2)
    )
    ids, into = (torch.randperm(num_blocks, device=bench.where) for _ in range(2))
    ours = bench.seconds(lambda _: triton_kv.copy_blocks(source, target, ids, into))
    plain = bench.seconds(lambda _: target.copy_(source))
    report.figures["pool_to_pool_copy_share"] = plain / ours
