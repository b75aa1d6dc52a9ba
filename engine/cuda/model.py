"""A `Model` on a GPU: decode steps by captured graphs, everything else launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from engine.batch import ForwardBatch
from engine.cuda.decoder import GpuDecoder, StepTensors
from engine.cuda.device import Device, Replay
from engine.cuda.inputs import DecodeInputs
from engine.cuda.memory import CudaKvCache
from engine.cuda.plan import GraphKey, InputLayout, decode_buckets, graph_key
from engine.cuda.sampling import CardSampler
from engine.errors import InternalError
from engine.kernels.triton_paged import DecodePart, step_parts
from engine.kv_cache import KvCache
from engine.sampler import SampledToken, SampleRow
from engine.sampling_params import SamplingParams


class GpuModel:
    """Tokens are drawn on the device: an engine's step waits for them and for nothing else. By `forward`, which is what
    a `Model` has, logits come to the host instead.

    A graph is captured when a step first needs it, and is bound to `kv`: there is one pool for each `GpuModel`.
    """

    def __init__(
        self, decoder: GpuDecoder, kv: CudaKvCache, device: Device, max_num_seqs: int, max_model_len: int
    ) -> None:
        self.config = decoder.config
        self._decoder = decoder
        self._kv = kv
        self._device = device
        self._buckets = decode_buckets(max_num_seqs)
        self._block_size = kv.layout.block_size
        self._inputs = DecodeInputs(
            InputLayout(max_num_seqs, -(-max_model_len // self._block_size)), self._block_size, device
        )
        vocab = self.config.vocab_size
        self._logits = device.pinned(max_num_seqs * vocab * 4).view(torch.float32).view(max_num_seqs, vocab)
        self._sampler = CardSampler(device)
        self.graphs: dict[GraphKey, Replay] = {}
        """Captured so far."""

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """See `Model`. The logits may be overwritten by the next call."""
        return self._to_host(self.compute(batch, kv))

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:  # [rows, vocab] float32
        """As `forward`, but the logits stay on the device, and nothing is waited for."""
        assert kv is self._kv, "graphs were captured over another pool"
        self._device.use()  # the engine's thread is not the one that built this
        logits = self._decode(batch)
        if logits is None:
            logits = self._decoder.forward(self._eager(batch), kv)
        else:
            num_seqs = len(batch.context_lens)
            logits = logits[:num_seqs] if len(batch.sample_rows) == num_seqs else logits[batch.sample_rows]
        self._kv.mark()
        return logits

    @torch.inference_mode()
    def forward_eagerly(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        """The same without a graph, whatever the batch."""
        self._device.use()
        logits = self._decoder.forward(self._eager(batch), kv)
        self._kv.mark()
        return self._to_host(logits)

    def draw(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken | InternalError]:
        """Tokens from what `compute` gave, or from rows of it, which may be changed. Waits for them."""
        return self._sampler.sample(logits, rows)

    def warm_up(self) -> None:
        """Capture what most decode steps need: each bucket, for contexts of one split; and draw. Writes into the first
        block of the pool, which nobody holds yet."""
        for bucket in self._buckets:
            batch = ForwardBatch(
                token_ids=torch.zeros(bucket, dtype=torch.int64),
                positions=torch.zeros(bucket, dtype=torch.int64),
                query_starts=list(range(bucket + 1)),
                context_lens=[1] * bucket,
                block_tables=[[0]] * bucket,
                sample_rows=list(range(bucket)),
            )
            logits = self.compute(batch, self._kv)
            self.draw(logits, [SampleRow(SamplingParams(temperature=0.0, logit_bias=((0, 1.0),)), 0)] * bucket)

    def _to_host(self, logits: torch.Tensor) -> torch.Tensor:
        if len(logits) > len(self._logits):
            return logits.cpu()  # of a prompt's tokens, for their logprobs: rare, and may be many
        into = self._logits[: len(logits)]
        if len(logits):
            self._device.download(logits, into)
        return into

    def _decode(self, batch: ForwardBatch) -> torch.Tensor | None:
        """Logits of every row of the bucket, by a graph; None if this is no decode step, or none of a size we have."""
        if not batch.sample_rows or any(end - start != 1 for start, end in pairwise(batch.query_starts)):
            return None  # without a download nobody would wait for the upload, and the buffer is written next time
        key = graph_key(len(batch.context_lens), max(batch.context_lens), self._buckets, self._decoder.split_keys)
        if key is None:
            return None
        self._inputs.fill(batch, key.bucket)
        if key not in self.graphs:
            step = self._step(key)
            self.graphs[key] = self._device.capture(lambda: self._decoder.forward(step, self._kv))
        return self.graphs[key]()

    def _step(self, key: GraphKey) -> StepTensors:
        field, bucket = self._inputs.field, key.bucket
        return StepTensors(
            token_ids=field("token_ids", bucket),
            positions=field("positions", bucket),
            slot_blocks=field("slot_blocks", bucket),
            slot_offsets=field("slot_offsets", bucket),
            decode=DecodePart(
                field("block_tables", bucket),
                field("context_lens", bucket),
                field("rows", bucket),
                key.splits * self._decoder.split_keys,
            ),
            prefill=None,
            sample_rows=None,
        )

    def _eager(self, batch: ForwardBatch) -> StepTensors:
        on_device = self._decoder.device
        tables = [
            torch.tensor(table[: -(-context_len // self._block_size)], dtype=torch.int32)
            for table, context_len in zip(batch.block_tables, batch.context_lens, strict=True)
        ]
        ordinals = batch.positions // self._block_size
        slot_blocks = [
            table[ordinals[start:end]] for table, (start, end) in zip(tables, pairwise(batch.query_starts), strict=True)
        ]
        decode, prefill = step_parts(
            tables, batch.query_starts, batch.context_lens, self._decoder.queries_per_tile(self._kv), on_device
        )
        return StepTensors(
            token_ids=batch.token_ids.to(on_device),
            positions=batch.positions.to(on_device),
            slot_blocks=torch.cat(slot_blocks).long().to(on_device),
            slot_offsets=(batch.positions % self._block_size).to(on_device),
            decode=decode,
            prefill=prefill,
            sample_rows=torch.tensor(batch.sample_rows, dtype=torch.int64).to(on_device),
        )
