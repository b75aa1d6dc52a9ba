"""The decoder on a GPU: Triton kernels between cuBLAS products. The arithmetic of `engine.model.decoder`.

The residual stream is float32, products are in the type of the weights, and so are queries and keys once they are
rotated, as the matrix units want them. Sums of a product depend on how many rows come together: so here, other than on
CPUs, a request's logits may differ in their last bits with its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.config import ModelConfig
from engine.kernels import attention_plan, triton_layers
from engine.kernels.scoring import Scoring
from engine.kernels.triton_kv import store_kv
from engine.kernels.triton_paged import (
    DecodePart,
    PartialResults,
    PrefillPart,
    arch_of,
    attend_decode,
    attend_prefill,
)
from engine.kv_cache import KvCache
from engine.model.decoder import DecoderWeights, LayerWeights, embedding_scale, soft_cap
from engine.model.layers import inverse_frequencies, local_frequencies


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step of T tokens, on the device. Everything that a captured graph reads stands in memory that stays."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64; negative: a row that is none
    slot_blocks: torch.Tensor  # [T] int64; negative: a row that is none
    slot_offsets: torch.Tensor  # [T] int64
    decode: DecodePart | None
    prefill: PrefillPart | None
    sample_rows: torch.Tensor | None  # [n] int64; None: all T


class GpuDecoder:
    """Weights on a device, and one pass over them. `max_context_len`: of any sequence that will come."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, max_context_len: int, max_num_seqs: int) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.split_keys = attention_plan.split_keys_for(max_context_len)
        self._weights = weights
        self._arch = arch_of(self.device)
        self._rotations = _rotations(inverse_frequencies(config), max_context_len, self.device)
        self._local_rotations = _rotations(local_frequencies(config), max_context_len, self.device)
        self._local_layers = frozenset(config.local.layers) if config.local else frozenset[int]()
        self._full = Scoring(config.score_scale)
        self._local = Scoring(config.score_scale, config.local.window if config.local else None)
        self._embedding_scale = embedding_scale(config, self.dtype)
        self._partial = PartialResults(self.device)
        most_splits = attention_plan.num_splits_for(max_context_len, None, self.split_keys)
        rounded = 1 << (most_splits - 1).bit_length()
        self._partial.reserve(max_num_seqs, config.num_heads, rounded, config.head_dim)

    def queries_per_tile(self, kv: KvCache) -> int:
        """Of the prefill part of a step over this pool."""
        group = self.config.num_heads // self.config.num_kv_heads
        quantized = kv.scales is not None
        return attention_plan.prefill_config(self.config.head_dim, group, quantized, self._arch).rows // group

    @torch.inference_mode()
    def forward(self, step: StepTensors, kv: KvCache) -> torch.Tensor:  # [n, vocab] float32
        """Write the KV of the step's tokens, and return the logits of its rows, on the device. Waits for nothing."""
        config, weights = self.config, self._weights
        hidden = F.embedding(step.token_ids, weights.embedding).float()  # [T, hidden]
        if config.scale_embedding:
            hidden *= self._embedding_scale
        x = torch.empty(hidden.shape, dtype=self.dtype, device=self.device)
        delta: torch.Tensor | None = None
        delta_norm: torch.Tensor | None = None
        for i, layer in enumerate(weights.layers):
            self._add_norm(hidden, delta, layer.input_norm, x, delta_norm)
            delta = self._attention(i, layer, x, step, kv)
            self._add_norm(hidden, delta, layer.mlp_norm, x, layer.post_attention_norm)
            delta, delta_norm = self._mlp(layer, x), layer.post_mlp_norm
        self._add_norm(hidden, delta, weights.final_norm, x, delta_norm)
        rows = x if step.sample_rows is None else x[step.sample_rows]
        return soft_cap(F.linear(rows, weights.lm_head).float(), config.final_soft_cap)

    def _add_norm(
        self,
        hidden: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        delta_norm: torch.Tensor | None,
    ) -> None:
        config = self.config
        triton_layers.add_norm(hidden, delta, weight, config.rms_norm_eps, out, delta_norm, config.norm_offset)

    def _attention(
        self, index: int, layer: LayerWeights, x: torch.Tensor, step: StepTensors, kv: KvCache
    ) -> torch.Tensor:  # [T, hidden]
        config = self.config
        local = index in self._local_layers
        rotations, scoring = (self._local_rotations, self._local) if local else (self._rotations, self._full)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        num_heads, rotated = config.num_heads, config.num_heads + config.num_kv_heads
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        triton_layers.rotate_in_place(
            qkv[:, :rotated], step.positions, rotations, num_heads, norms, config.rms_norm_eps, config.norm_offset
        )
        k, v = qkv[:, num_heads:rotated], qkv[:, rotated:]
        store_kv(k, v, kv.pool, index, step.slot_blocks, step.slot_offsets, kv.scales)
        mixed = torch.empty(len(x), num_heads, config.head_dim, dtype=self.dtype, device=self.device)
        pool, scales = kv.pool[:, index], None if kv.scales is None else kv.scales[:, index]
        q = qkv[:, :num_heads]
        if step.decode is not None:
            attend_decode(q, pool, scales, step.decode, scoring, self.split_keys, self._partial, mixed, self._arch)
        if step.prefill is not None:
            attend_prefill(q, pool, scales, step.prefill, scoring, mixed, self._arch)
        return F.linear(mixed.flatten(1), layer.attention_out)

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:  # [T, hidden]
        gated = torch.empty(len(x), self.config.intermediate_size, dtype=self.dtype, device=self.device)
        triton_layers.gate(F.linear(x, layer.gate_up), gated, gelu=self.config.activation != "silu")
        return F.linear(gated, layer.down)


def _rotations(
    frequencies: torch.Tensor,  # [head_dim / 2] float64
    num_positions: int,
    device: torch.device,
) -> torch.Tensor:  # [positions, 2, head_dim / 2] float32
    """From float64, so that every machine rounds to the same numbers."""
    angles = torch.arange(num_positions).unsqueeze(-1) * frequencies
    return torch.stack((angles.cos().float(), angles.sin().float()), dim=1).to(device)
