"""Draws tokens where the logits are: `engine.sampler` on a GPU, of which only the tokens come to the host.

What a row's parameters and former tokens change is worked out here as a few numbers for a few tokens; logprobs are
worked out on the host, from the rows that want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda.device import Device
from engine.errors import InternalError, NotFinite
from engine.kernels import triton_sampling
from engine.sampler import SampledToken, SampleRow, token_logprobs

_FLOATS = ("inverse temperature", "top_p", "min_p")
_INTEGERS = ("top_k", "seed", "position")
_NOT_FINITE = -1
_MOST = 1e300
"""Of an inverse temperature: the peak less itself, times this, is still zero."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Of logits before the draw: for each row some tokens, ascending."""

    starts: npt.NDArray[np.int32]  # [n + 1]
    ids: npt.NDArray[np.int32]  # [entries]
    biases: npt.NDArray[np.float32]  # [entries]; -inf: banned
    penalties: npt.NDArray[np.float32]  # [entries]
    subtracted: npt.NDArray[np.float32]  # [entries]

    def on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        arrays = (self.starts, self.ids, self.biases, self.penalties, self.subtracted)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)


class CardSampler:
    """One thread uses it. A call waits for its tokens, and for nothing that comes after them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room = 0

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab] float32, on the device; may be changed
        rows: Sequence[SampleRow],  # n
    ) -> list[SampledToken | InternalError]:
        """As `engine.sampler.sample`."""
        if len(logits) != len(rows):
            raise InternalError(f"{len(logits)} rows of logits for {len(rows)} rows to sample")
        if not rows:
            return []
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        told = {i: logits[i : i + 1].to("cpu", copy=True) for i in wanted}
        if (changes := changes_of(rows, logits.shape[1])) is not None:
            triton_sampling.adjust(logits, *changes.on(logits.device))
        drawn = triton_sampling.sample(logits, *self._parameters(rows))
        tokens = self._tokens[: len(rows)]
        self._device.download(drawn, tokens)
        return [
            _result(token, row, told.get(i)) for i, (token, row) in enumerate(zip(tokens.tolist(), rows, strict=True))
        ]

    def _parameters(self, rows: Sequence[SampleRow]) -> list[torch.Tensor]:
        """[n] each, float64 and int64, on the device."""
        count = len(rows)
        self._reserve(count)
        host = self._host.numpy()
        values = [
            (
                min(1 / row.params.temperature, _MOST) if row.params.temperature else 0.0,
                row.params.top_p,
                row.params.min_p,
                row.params.top_k,
                row.params.seed or 0,
                row.position,
            )
            for row in rows
        ]
        for at, column in enumerate(zip(*values, strict=True)):
            kind: npt.DTypeLike = np.float64 if at < len(_FLOATS) else np.uint64
            host[at, :count].view(kind)[:] = np.array(column, dtype=kind)
        self._device.upload(self._host, self._on_device)
        fields = [self._on_device[at, :count] for at in range(len(_FLOATS + _INTEGERS))]
        return [field.view(torch.float64) if at < len(_FLOATS) else field for at, field in enumerate(fields)]

    def _reserve(self, count: int) -> None:
        if count <= self._room:
            return
        self._room = 1 << (count - 1).bit_length()
        num_fields = len(_FLOATS + _INTEGERS)
        self._host = self._device.pinned(num_fields * self._room * 8).view(torch.int64).view(num_fields, -1)
        self._on_device = torch.zeros(self._host.shape, dtype=torch.int64, device=self._device.torch_device)
        self._tokens = self._device.pinned(self._room * 8).view(torch.int64)


def changes_of(rows: Sequence[SampleRow], vocab: int) -> Changes | None:
    """None if no row changes anything."""
    parts = [_row_changes(row, vocab) for row in rows]
    starts = np.cumsum([0, *(len(ids) for ids, *_ in parts)], dtype=np.int32)
    if not starts[-1]:
        return None
    ids, *values = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Changes(starts, ids.astype(np.int32), *values)


def _row_changes(
    row: SampleRow, vocab: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Ids, biases, penalties, what is subtracted: the numbers that `engine.sampler` adds, divides by and subtracts."""
    params = row.params
    banned = [token_id for token_id in row.banned_token_ids if 0 <= token_id < vocab]
    biased = [(token_id, bias) for token_id, bias in params.logit_bias if token_id < vocab]
    seen = [*row.prompt, *row.output] if params.repetition_penalty != 1.0 else []
    output = list(row.output) if params.presence_penalty or params.frequency_penalty else []
    ids = np.unique(np.array([*banned, *(token_id for token_id, _ in biased), *seen, *output], np.int64))
    biases, penalties, subtracted = (np.full(len(ids), value, np.float32) for value in (0.0, 1.0, 0.0))
    if biased:
        biases[np.searchsorted(ids, [token_id for token_id, _ in biased])] = [bias for _, bias in biased]
    if banned:
        biases[np.searchsorted(ids, banned)] = -np.inf
    if seen:
        penalties[np.searchsorted(ids, np.unique(seen))] = params.repetition_penalty
    if output:
        drawn, counts = np.unique(np.array(output, np.int64), return_counts=True)
        subtracted[np.searchsorted(ids, drawn)] = params.presence_penalty + params.frequency_penalty * counts
    return ids, biases, penalties, subtracted


def _result(token: int, row: SampleRow, logits: torch.Tensor | None) -> SampledToken | InternalError:
    if token < 0:
        if token == _NOT_FINITE:
            return NotFinite(f"position {row.position}: the largest logit is not finite")
        return InternalError(f"position {row.position}: every token is banned or impossible")
    if not row.params.greedy and row.params.seed is None:
        return InternalError(f"position {row.position}: a random draw without a seed")
    if logits is None or row.params.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, token_logprobs(logits, [token], row.params.logprobs)[0])
