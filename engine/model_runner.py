"""Turns the scheduler's choice into tensors and runs the model on them. Knows no policy and no request's end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from engine.batch import ForwardBatch, ScheduledBatch
from engine.config import CacheConfig
from engine.errors import InternalError
from engine.interruption import CancelWatch, PassControl
from engine.kv_cache import KvCache
from engine.model.decoder import Model
from engine.request import Request
from engine.sampler import SampledToken, SampleRow, sample, sample_row


@runtime_checkable
class DrawingModel(Model, Protocol):
    """A `Model` that can leave its logits where they are computed, and draw from them there."""

    def compute(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """As `forward`, but nothing waits for the logits, which are not in host memory."""

    def draw(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | InternalError]:
        """As `engine.sampler.sample`, of what `compute` gave, or of rows of it; they may be overwritten."""


class ModelRunner:
    """One model and the KV pool it reads and writes."""

    def __init__(self, model: Model, kv: KvCache) -> None:
        self._model = model
        self._kv = kv
        self._forward, self._sample = model.forward, sample
        if isinstance(model, DrawingModel):
            self._forward, self._sample = model.compute, model.draw
        self.cancels = CancelWatch(model.config.num_layers, all_or_none=kv.layout.quantized)

    def forward(self, batch: ScheduledBatch) -> torch.Tensor:
        """Compute the batch's tokens and store their KV.

        Returns logits [n, vocab] float32, one row for each position that a sequence wants them of, in the order of the
        batch. Whatever the model raises goes through, `PassStopped` among it; the KV of the batch's tokens is then
        undefined, all other KV is untouched.
        """
        with torch.inference_mode(), self.cancels.watching(batch) as control:
            forward_batch = to_forward_batch(batch, control)
            logits = self._forward(forward_batch, self._kv)
        expected = (len(forward_batch.sample_rows), self._model.config.vocab_size)
        if logits.shape != expected:
            raise InternalError(f"the model gave logits of shape {tuple(logits.shape)}, expected {expected}")
        return logits

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[SampledToken | InternalError]:
        """A token for each request, of its row; see `engine.sampler.sample`. `logits` are of the last `forward`."""
        eos_token_ids = self._model.config.eos_token_ids
        return self._sample(logits, [sample_row(request, eos_token_ids) for request in requests])


def to_forward_batch(batch: ScheduledBatch, control: PassControl | None = None) -> ForwardBatch:
    """The tokens of all sequences, one sequence after the other. Block tables are shared with the requests."""
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    sample_rows: list[int] = []
    for sequence in batch.sequences:
        start = sequence.request.num_computed_tokens
        end = start + sequence.num_tokens
        token_ids += sequence.request.token_ids[start:end]
        positions += range(start, end)
        query_starts.append(len(token_ids))
        context_lens.append(end)
        sample_rows += [len(token_ids) - end + position for position in sequence.logit_positions]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=[sequence.request.block_table for sequence in batch.sequences],
        sample_rows=sample_rows,
        control=control,
    )


def check_model_fits_pool(model: Model, kv: KvCache, cache_config: CacheConfig) -> None:
    """Refuse to build an engine of parts that do not belong together. Raises `InternalError` naming the part."""
    layout, config = kv.layout, model.config
    pairs = {
        "num_layers": (layout.num_layers, config.num_layers),
        "num_kv_heads": (layout.num_kv_heads, config.num_kv_heads),
        "head_dim": (layout.head_dim, config.head_dim),
        "block_size": (layout.block_size, cache_config.block_size),
        "num_blocks": (kv.num_blocks, cache_config.num_blocks),
    }
    for name, (of_pool, wanted) in pairs.items():
        if of_pool != wanted:
            raise InternalError(f"the KV pool has {name} {of_pool}, the engine needs {wanted}")
    window, of_model = cache_config.sliding_window, config.shared_window
    if window is not None and (of_model is None or window < of_model):
        raise InternalError(f"sliding_window {window} gives back blocks that the model, with {of_model}, still reads")
