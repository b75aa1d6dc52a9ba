"""The inputs of a decode step, in memory that stays, as captured graphs read it. Filled on the host, copied at once."""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import ForwardBatch
from engine.cuda.device import Device
from engine.cuda.plan import InputLayout
from engine.errors import InternalError

_DTYPES = {4: torch.int32, 8: torch.int64}


class DecodeInputs:
    """One buffer in pinned memory and its twin on the device, both cut up by an `InputLayout`."""

    def __init__(self, layout: InputLayout, block_size: int, device: Device) -> None:
        self._layout = layout
        self._block_size = block_size
        self._device = device
        self._host = device.pinned(layout.nbytes)
        self._on_device = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device.torch_device)
        self._views = {name: view.numpy() for name, view in self._cut(self._host).items()}
        self._device_views = self._cut(self._on_device)

    def field(self, name: str, num_rows: int) -> torch.Tensor:
        """[num_rows] int64 or int32, block tables [num_rows, max_blocks] int32: on the device, where it stays."""
        view = self._device_views[name][:num_rows]
        return view if name == "block_tables" else view[:, 0]

    def fill(self, batch: ForwardBatch, bucket: int) -> None:
        """Copy a batch of sequences with one token each; rows up to `bucket` become sequences that are none.

        Raises `InternalError`, with nothing copied, for a batch that does not fit.
        """
        num_seqs = len(batch.context_lens)
        if num_seqs != len(batch.token_ids) or num_seqs > bucket or bucket > self._layout.max_num_seqs:
            raise InternalError(f"{num_seqs} sequences with {len(batch.token_ids)} tokens are no step of {bucket} rows")
        positions = batch.positions.numpy()
        tables = self._views["block_tables"]
        slot_blocks = self._views["slot_blocks"]
        for row, (table, context_len) in enumerate(zip(batch.block_tables, batch.context_lens, strict=True)):
            num_blocks = -(-context_len // self._block_size)
            if num_blocks > self._layout.max_blocks or num_blocks > len(table):
                raise InternalError(
                    f"a context of {context_len} has {num_blocks} blocks, its table {len(table)}, the buffer "
                    f"{self._layout.max_blocks}"
                )
            tables[row, :num_blocks] = table[:num_blocks]
            slot_blocks[row] = table[num_blocks - 1]
        self._set("token_ids", batch.token_ids.numpy(), bucket, 0)
        self._set("positions", positions, bucket, -1)
        self._set("slot_offsets", positions % self._block_size, bucket, 0)
        self._set("context_lens", np.asarray(batch.context_lens), bucket, 0)
        self._set("rows", np.arange(num_seqs), bucket, 0)
        slot_blocks[num_seqs:bucket] = -1
        used = self._layout.used_bytes(bucket)
        self._device.upload(self._host[:used], self._on_device[:used])

    def _set(self, name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.int64]], bucket: int, rest: int) -> None:
        view = self._views[name][:, 0]
        view[: len(values)] = values
        view[len(values) : bucket] = rest

    def _cut(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """[max_num_seqs, columns] each."""
        rows = self._layout.max_num_seqs
        return {
            name: buffer[field.offset : field.end(rows)].view(_DTYPES[field.width]).view(rows, field.columns)
            for name, field in self._layout.fields().items()
        }
