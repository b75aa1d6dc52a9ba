"""The shapes that kernels are compiled and measured for: attention heads of model families, KV types, sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels import attention_plan as plan
from engine.kernels import triton_attention, triton_kv, triton_layers, triton_paged, triton_sampling
from engine.kernels.scoring import Scoring

KERNELS: tuple[Any, ...] = (
    triton_attention.decode_kernel,
    triton_attention.reduce_kernel,
    triton_attention.prefill_kernel,
    triton_kv.store_kernel,
    triton_kv.store_quantized_kernel,
    triton_kv.copy_kernel,
    triton_layers.add_norm_kernel,
    triton_layers.rotate_kernel,
    triton_layers.gate_kernel,
    triton_sampling.sample_kernel,
    triton_sampling.adjust_kernel,
    triton_sampling.uniform_kernel,
)
ATTENTION = ("decode_kernel", "prefill_kernel")
"""Those that must use the matrix units."""


@dataclass(frozen=True, slots=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SMOLLM = Heads("SmolLM2-135M", 9, 3, 64)
LLAMA = Heads("Llama-3-8B", 32, 8, 128)
PHI = Heads("Phi-3-mini", 32, 32, 96)
GEMMA = Heads("Gemma-3-4B", 8, 4, 256)
KV_TYPES = (None, torch.float8_e4m3fn, torch.int8)
"""None: as the activations."""

_MAX_LEN = 131072
_BLOCKS = 1 << 17


@dataclass(frozen=True, slots=True)
class Case:
    """`launch` makes the launches of one case for a compute capability (x 10), on tensors of torch's `meta` device."""

    name: str
    launch: Callable[[int], object]


def cases() -> Iterator[Case]:
    """What differs for the compiler: head size, types, block size, window and cap. Numbers of heads hardly do."""
    for heads in (SMOLLM, LLAMA, GEMMA):
        for kv_type in KV_TYPES:
            yield from _attention_cases(heads, torch.bfloat16, kv_type, Scoring(0.1))
            yield from _store_cases(heads, kv_type)
    yield from _attention_cases(PHI, torch.bfloat16, None, Scoring(0.1))
    yield from _attention_cases(LLAMA, torch.bfloat16, None, Scoring(0.1), longest=1)
    yield from _attention_cases(LLAMA, torch.float16, torch.float8_e4m3fn, Scoring(0.1))
    yield from _attention_cases(LLAMA, torch.bfloat16, None, Scoring(0.1), block_size=64)
    yield from _attention_cases(GEMMA, torch.bfloat16, None, Scoring(0.1, window=1024, soft_cap=50.0))
    yield from _layer_cases()


def _attention_cases(
    heads: Heads,
    dtype: torch.dtype,
    kv_type: torch.dtype | None,
    scoring: Scoring,
    block_size: int = 16,
    longest: int = _MAX_LEN,
) -> Iterator[Case]:
    name = f"{heads.name}, {_short(dtype)}, KV {_short(kv_type or dtype)}, blocks of {block_size}"
    if scoring.window is not None:
        name += ", window and cap"
    kv, scales = _pool(heads, kv_type or dtype, block_size)
    q = _meta(64, heads.num_heads, heads.head_dim, dtype=dtype)
    tables = _meta(64, _MAX_LEN // block_size, dtype=torch.int32)
    some = _meta(64, dtype=torch.int32)
    partial = triton_paged.PartialResults(torch.device("meta"))
    part = triton_paged.DecodePart(tables, some, some, longest)
    split_keys = plan.split_keys_for(_MAX_LEN)
    yield Case(
        f"{name}{'' if longest > 1 else ', one split'}",
        lambda arch: triton_paged.attend_decode(q, kv, scales, part, scoring, split_keys, partial, q, arch),
    )
    if longest == 1:
        return
    tiles = triton_paged.PrefillPart(tables, some, _meta(65, dtype=torch.int32), some, some)
    yield Case(name, lambda arch: triton_paged.attend_prefill(q, kv, scales, tiles, scoring, q, arch))


def _store_cases(heads: Heads, kv_type: torch.dtype | None) -> Iterator[Case]:
    kv, scales = _pool(heads, kv_type or torch.bfloat16, 16)
    qkv = _meta(512, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=torch.bfloat16)
    k, v = qkv[:, heads.num_heads : heads.num_heads + heads.num_kv_heads], qkv[:, -heads.num_kv_heads :]
    slots = _meta(512, dtype=torch.int64)
    yield Case(
        f"{heads.name}, KV {_short(kv.dtype)}",
        lambda _: triton_kv.store_kv(
            k, v, kv.unsqueeze(1), 0, slots, slots, None if scales is None else scales.unsqueeze(1)
        ),
    )


def _layer_cases() -> Iterator[Case]:
    dtype = torch.bfloat16
    for hidden in (576, 4096, 16384):
        residual, delta, weight = _meta(64, hidden), _meta(64, hidden, dtype=dtype), _meta(hidden, dtype=dtype)
        for added in (None, delta):
            for normed in (None, weight) if added is not None else (None,):
                name = (
                    f"hidden {hidden}{', delta' if added is not None else ''}{' normed' if normed is not None else ''}"
                )
                yield Case(
                    name,
                    lambda _, a=added, n=normed, r=residual, d=delta, w=weight: triton_layers.add_norm(  # type: ignore[misc]
                        r, a, w, 1e-5, d, n
                    ),
                )
    for heads in (SMOLLM, PHI, GEMMA):
        qk = _meta(64, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype)
        qk = qk[:, : heads.num_heads + heads.num_kv_heads]
        table, norm = _meta(_MAX_LEN, 2, heads.head_dim // 2), _meta(heads.head_dim, dtype=dtype)
        positions = _meta(64, dtype=torch.int64)
        for norms in (None, (norm, norm)):
            yield Case(
                f"{heads.name}{', normed heads' if norms else ''}",
                lambda _, q=qk, p=positions, t=table, h=heads, n=norms: triton_layers.rotate_in_place(  # type: ignore[misc]
                    q, p, t, h.num_heads, n, 1e-6
                ),
            )
    for gelu in (False, True):
        gate_up, out = _meta(64, 2 * 14336, dtype=dtype), _meta(64, 14336, dtype=dtype)
        yield Case("GELU" if gelu else "SiLU", lambda _, g=gelu, a=gate_up, b=out: triton_layers.gate(a, b, g))  # type: ignore[misc]
    blocks, ids = _meta(_BLOCKS, 4096, dtype=torch.uint8), _meta(64, dtype=torch.int64)
    yield Case("whole blocks", lambda _: triton_kv.copy_blocks(blocks, blocks, ids, ids))
    row = _meta(64, dtype=torch.float64)
    yield Case("uniform", lambda _: triton_sampling.uniform_kernel[(64,)](ids, ids, row))
    yield Case(
        "vocabulary of 128k",
        lambda _: triton_sampling.sample(_meta(64, 128256), row, row, row, ids, ids, ids),
    )
    tokens, changes = _meta(640, dtype=torch.int32), _meta(640)
    yield Case(
        "penalties, biases and bans",
        lambda _: triton_sampling.adjust(
            _meta(64, 128256), _meta(65, dtype=torch.int32), tokens, changes, changes, changes
        ),
    )


def _pool(heads: Heads, kv_type: torch.dtype, block_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One layer of a pool that is larger than 2^31 values, and its scales."""
    shape = (2, heads.num_kv_heads, block_size, heads.head_dim)
    block = 32 * shape[0] * shape[1] * shape[2] * shape[3]  # 32 layers
    strides = (block, shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    kv = torch.empty_strided((_BLOCKS, *shape), strides, dtype=kv_type, device="meta")
    if kv_type not in (torch.float8_e4m3fn, torch.int8):
        return kv, None
    scales_strides = (block // 4, heads.num_kv_heads, 1)
    return kv, torch.empty_strided((_BLOCKS, 2, heads.num_kv_heads), scales_strides, device="meta")


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
