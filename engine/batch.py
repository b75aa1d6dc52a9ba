"""What one step works on: the scheduler's choice (ids and counts) and its form for the model (tensors)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.adoption import MissingBlock
from engine.request import Request

if TYPE_CHECKING:
    import torch  # so that the scheduler, and a simulation of it, run without

    from engine.interruption import PassControl


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` of `request`, from `request.num_computed_tokens` on."""

    request: Request
    num_tokens: int
    samples: bool
    """Whether these tokens end at the last one known, so that the next one is drawn from their last logits."""

    @property
    def logit_positions(self) -> list[int]:
        """Of those tokens whose logits are wanted, ascending; before they are computed."""
        last = self.request.num_computed_tokens + self.num_tokens - 1
        return [*self.request.untold_positions(self.num_tokens), *([last] if self.samples else [])]


@dataclass(frozen=True, slots=True)
class GrantedBlocks:
    """A DECODE request got its blocks in this step; `missing` are those whose KV a link has to bring."""

    request: Request
    cached_tokens: int
    """Leading tokens whose KV was resident."""
    missing: tuple[MissingBlock, ...]


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The scheduler's decision for one step; the model runner and `Engine.step` only read it."""

    sequences: tuple[ScheduledSequence, ...] = ()
    granted: tuple[GrantedBlocks, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def draws(self) -> list[tuple[int, Request]]:
        """For each token to be drawn the row of the logits and whose it is; before the batch is computed."""
        rows: list[tuple[int, Request]] = []
        num_rows = 0
        for sequence in self.sequences:
            num_rows += len(sequence.logit_positions)
            if sequence.samples:
                rows += [(num_rows - 1, drawing) for drawing in (sequence.request, *sequence.request.drawing_along)]
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences, one sequence after the other."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, position of each token in its sequence
    query_starts: list[int]
    """S + 1 offsets into T: sequence s has the tokens `query_starts[s]:query_starts[s + 1]`."""
    context_lens: list[int]
    """S: tokens of each sequence that have KV once this step is done, those of this step included."""
    block_tables: list[list[int]]
    """S: blocks that hold each sequence's context, in order; at least `ceil(context_len / block_size)`."""
    sample_rows: list[int]
    """Rows of T whose logits are wanted, ascending."""
    control: PassControl | None = None
    """Looked at before each layer by a model that can stop there."""
