"""The decoder on this CPU's own instructions: one native call for each forward pass.

The arithmetic is that of `engine.model.decoder`, which is the oracle: weights in bfloat16 or int8, activations in
bfloat16, sums and the residual stream in float32. A token's result does not depend on the tokens, sequences or threads
that come with it, to the last bit: the tokens of a request do not depend on how it was batched, chunked, handed over or
resumed.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.errors import InternalError
from engine.interruption import PassStopped
from engine.kv_cache import KvCache
from engine.model.decoder import embedding_scale, soft_cap
from engine.model.layers import inverse_frequencies, local_frequencies
from engine.model.packed_weights import PACKED, PLAIN, PackedWeights
from engine.native.decoder import MAX_HEAD_DIM, TILE, BatchParts, LayerParts, ModelParts, NativeDecoder

_LANES = 16
"""Floats of the widest register: sizes are multiples of it."""
MAX_INT8_COLUMNS = 2**31 // (255 * 127)
"""Products of a sum in int32, each at most 255 times 127."""
_POSITIONS = 1024
"""By how many positions the table of rotations grows."""


def obstacle(config: ModelConfig, dtype: str, kv_dtype: str, weights_dtype: str = "auto") -> str | None:
    """Why the native code cannot run this model, or None."""
    if dtype != "bfloat16":
        return f"dtype is {dtype}, not bfloat16"
    if kv_dtype != "bfloat16":
        return f"kv_cache_dtype is {kv_dtype}, not bfloat16"
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % _LANES:
            return f"{name} {getattr(config, name)} is no multiple of {_LANES}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is more than {MAX_HEAD_DIM}"
    widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if weights_dtype == "int8" and widest > MAX_INT8_COLUMNS:
        return f"weights_dtype is int8, and {widest} products are more than the {MAX_INT8_COLUMNS} of a sum"
    return None


class NativeModel:
    """A `Model`. Owns its packed weights."""

    def __init__(self, config: ModelConfig, weights: PackedWeights, decoder: NativeDecoder, num_threads: int) -> None:
        self.config = config
        self._decoder = decoder
        self._num_threads = num_threads
        self._weights = weights
        addresses = weights.addresses
        self._layers = (LayerParts * config.num_layers)()
        for i, parts in enumerate(self._layers):
            for name in (*PACKED, *PLAIN):
                setattr(parts, name, addresses.get(f"{i}.{name}"))
        if config.local is not None:
            for i in config.local.layers:
                self._layers[i].window, self._layers[i].rotation = config.local.window, 1
        self._model = ModelParts(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            gelu=config.activation == "gelu_tanh",
            int8=weights.int8,
            norm_eps=config.rms_norm_eps,
            scale=config.score_scale,
            norm_offset=config.norm_offset,
            embedding_scale=embedding_scale(config, torch.bfloat16),
            embedding=addresses["embedding"],
            final_norm=addresses["final_norm"],
            lm_head=addresses["embedding" if config.tie_word_embeddings else "lm_head"],
            layers=ctypes.addressof(self._layers),
        )
        self._frequencies = (inverse_frequencies(config), local_frequencies(config))
        # Layers without a window, and with: [2, positions, head_dim] float32; in a row cosines, then sines.
        self._rotations = torch.empty(2, 0, config.head_dim)
        self._scratch = decoder.new_scratch()

    def __del__(self) -> None:
        if hasattr(self, "_scratch"):
            self._decoder.delete_scratch(self._scratch)

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """See `Model`. Raises `InternalError`, with nothing written, for what would lead outside pool or embedding."""
        tables = [self._table(batch, s, kv.layout.block_size) for s in range(len(batch.block_tables))]
        table_starts = np.cumsum([0, *map(len, tables)], dtype=np.int32)
        blocks = _int32([block for table in tables for block in table])
        query_starts, sample_rows = _int32(batch.query_starts), _int32(batch.sample_rows)
        self._check(batch, blocks, kv)
        logits = torch.empty(len(batch.sample_rows), -(-self.config.vocab_size // TILE) * TILE)
        parts = BatchParts(
            num_tokens=len(batch.token_ids),
            num_sequences=len(tables),
            num_samples=len(batch.sample_rows),
            block_size=kv.layout.block_size,
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            query_starts=query_starts.ctypes.data,
            table_starts=table_starts.ctypes.data,
            tables=blocks.ctypes.data,
            sample_rows=sample_rows.ctypes.data,
            rotations=(self._rotations[0].data_ptr(), self._rotations[1].data_ptr()),
            pool=kv.address,
            control=None if batch.control is None else ctypes.addressof(batch.control),
        )
        if not self._decoder.forward(self._model, parts, self._scratch, logits.data_ptr(), self._num_threads):
            raise PassStopped
        return soft_cap(logits[:, : self.config.vocab_size], self.config.final_soft_cap)

    def _table(self, batch: ForwardBatch, s: int, block_size: int) -> list[int]:
        """The blocks of a sequence's context; those that left the window, which are not read, as one that exists."""
        table = batch.block_tables[s][: -(-batch.context_lens[s] // block_size)]
        window = self.config.shared_window
        if window is None:
            return table
        num_queries = batch.query_starts[s + 1] - batch.query_starts[s]
        gone = max(0, batch.context_lens[s] - num_queries + 1 - window) // block_size
        return [0] * gone + table[gone:]

    def _check(self, batch: ForwardBatch, blocks: npt.NDArray[np.int32], kv: KvCache) -> None:
        if kv.layout.block_size & (kv.layout.block_size - 1):
            raise InternalError(f"block_size {kv.layout.block_size} is no power of two")
        if blocks.min() < 0 or blocks.max() >= kv.num_block_ids:
            raise InternalError(f"blocks {blocks.min()} to {blocks.max()} are not all in a pool of {kv.num_blocks}")
        lowest, highest = int(batch.token_ids.min()), int(batch.token_ids.max())
        if lowest < 0 or highest >= self.config.vocab_size:
            raise InternalError(f"tokens {lowest} to {highest} are not all in {self.config.vocab_size}")
        for s, context_len in enumerate(batch.context_lens):
            first, end = batch.query_starts[s], batch.query_starts[s + 1]
            at = batch.positions[first], batch.positions[end - 1]
            if end <= first or int(at[0]) != context_len - (end - first) or int(at[1]) != context_len - 1:
                raise InternalError(f"sequence {s}: its tokens are not the last of a context of {context_len}")
        longest = max(batch.context_lens)
        if longest > self._rotations.shape[1]:
            num_positions = -(-longest // _POSITIONS) * _POSITIONS
            self._rotations = torch.stack([_rotations(num_positions, each) for each in self._frequencies])


def _rotations(num_positions: int, frequencies: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(num_positions).unsqueeze(-1) * frequencies  # float64, so that all machines round alike
    return torch.cat((angles.cos().float(), angles.sin().float()), dim=-1)


def _int32(values: list[int]) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
