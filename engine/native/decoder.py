"""The whole forward pass of a dense decoder in native code: how it is built, and what its structures look like.

`cpu_model.cpp` says what it computes; `engine.model.native_decoder` is who calls it.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from pathlib import Path
from typing import ClassVar

from engine.errors import NativeUnavailable
from engine.native import build

TILE = 32
"""Rows of a packed weight come in so many; see `linear.h`."""
MAX_HEAD_DIM = 256
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=gnu++17", "-O3", build.THIS_CPU, "-fPIC", "-shared")
_INCLUDES = ("simd.h", "tiles.h", "linear.h", "linear_int8.h", "attention.h")


def packed_bytes(rows: int, columns: int, *, int8: bool) -> int:
    """Of a packed weight; see `linear.h` and `linear_int8.h`."""
    padded = -(-rows // TILE) * TILE
    return padded * (columns + 8) if int8 else 2 * padded * columns


class LayerParts(ctypes.Structure):
    """`Layer` of `cpu_model.cpp`: addresses of a layer's parameters, and how its attention looks back."""

    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("input_norm", "qkv", "attention_out", "mlp_norm", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "q_norm", "k_norm", "post_attention_norm", "post_mlp_norm")),
        ("window", c_int32),
        ("rotation", c_int32),
    ]


class ModelParts(ctypes.Structure):
    """`Model` of `cpu_model.cpp`."""

    _fields_: ClassVar = [
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("gelu", c_int32),
        ("int8", c_int32),
        ("norm_eps", c_float),
        ("scale", c_float),
        ("norm_offset", c_float),
        ("embedding_scale", c_float),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("lm_head", c_void_p),
        ("layers", c_void_p),
    ]


class BatchParts(ctypes.Structure):
    """`Batch` of `cpu_model.cpp`."""

    _fields_: ClassVar = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_samples", c_int32),
        ("block_size", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("table_starts", c_void_p),
        ("tables", c_void_p),
        ("sample_rows", c_void_p),
        ("rotations", c_void_p * 2),
        ("pool", c_void_p),
        ("control", c_void_p),
    ]


class AttentionShape(ctypes.Structure):
    """`AttentionShape` of `cpu_model.cpp`. `window`: tokens that a query sees, itself included; 0: all before it."""

    _fields_: ClassVar = [
        ("num_queries", c_int32),
        ("context_len", c_int32),
        ("num_layers", c_int32),
        ("layer", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("block_size", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
    ]


class NativeDecoder:
    """Kernels for bfloat16 or int8 weights and bfloat16 KV. Knows addresses, no tensors: who calls has checked all that
    they say."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        _declare(library, "kv_instruction_set", result=ctypes.c_char_p)
        _declare(library, "kv_pack_weight", c_void_p, c_void_p, c_int32, c_int32, c_int32)
        _declare(library, "kv_linear", c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_int32)
        _declare(library, "kv_attention", *[c_void_p] * 5, c_float)
        _declare(library, "kv_scratch_new", result=c_void_p)
        _declare(library, "kv_scratch_delete", c_void_p)
        _declare(library, "kv_forward", c_void_p, c_void_p, c_void_p, c_void_p, c_int32, result=c_int32)

    @property
    def name(self) -> str:
        """The instructions that it was compiled for: `avx512_bf16`, `avx512`, `avx2` or `baseline`."""
        name: bytes = self._library.kv_instruction_set()
        return name.decode()

    def pack_weight(self, weight: int, packed: int, rows: int, columns: int, *, int8: bool = False) -> None:
        """From [rows][columns] bfloat16 to tiles, of int8 on request: `packed` has room for `packed_bytes`."""
        self._library.kv_pack_weight(weight, packed, rows, columns, int8)

    def new_scratch(self) -> int:
        """Memory that passes keep between them, for one at a time; `delete_scratch` gives it back."""
        scratch: int = self._library.kv_scratch_new()
        return scratch

    def delete_scratch(self, scratch: int) -> None:
        self._library.kv_scratch_delete(scratch)

    def forward(self, model: ModelParts, batch: BatchParts, scratch: int, logits: int, num_threads: int) -> bool:
        """Without the GIL. `logits`: [num_samples][vocab rounded up to whole tiles] float32.

        False, and no logits, if `batch.control` said so before the last layer.
        """
        done: int = self._library.kv_forward(ctypes.byref(model), ctypes.byref(batch), scratch, logits, num_threads)
        return done != 0

    def linear(self, packed: int, x: int, y: int, rows: int, columns: int, outputs: int, *, int8: bool = False) -> None:
        """One product of a pass, alone: y [rows][outputs rounded up] float32 = x [rows][columns] W^T."""
        self._library.kv_linear(packed, x, y, rows, columns, outputs, int8)

    def attention(self, q: int, out: int, pool: int, table: int, shape: AttentionShape, scale: float) -> None:
        """A layer's attention alone, for the last tokens of one sequence. q, out: [query][head][head_dim] bfloat16."""
        self._library.kv_attention(q, out, pool, table, ctypes.byref(shape), scale)


def load_decoder(cache: Path) -> NativeDecoder:
    """Built if `cache` lacks it, with threads where the compiler has OpenMP. Raises `NativeUnavailable`, with why."""
    try:
        return NativeDecoder(_load(cache, (*_FLAGS, "-fopenmp")))
    except NativeUnavailable:
        return NativeDecoder(_load(cache, _FLAGS))


def _load(cache: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    return build.load("cpu_model.cpp", cache, compilers=_COMPILERS, flags=flags, includes=_INCLUDES)


def _declare(library: ctypes.CDLL, name: str, *arguments: type, result: type | None = None) -> None:
    function = getattr(library, name)
    function.argtypes = arguments
    function.restype = result
