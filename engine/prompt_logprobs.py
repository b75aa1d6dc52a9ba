"""The probabilities of a prompt's own tokens, from the logits of the steps that compute it."""

from __future__ import annotations

import torch

from engine.batch import ScheduledBatch
from engine.sampler import TokenLogprobs, token_logprobs


def prompt_logprobs(batch: ScheduledBatch, logits: torch.Tensor) -> dict[str, tuple[TokenLogprobs, ...]]:
    """By request, of those that want them; before the batch counts as computed."""
    told: dict[str, tuple[TokenLogprobs, ...]] = {}
    if all(sequence.request.prompt_logprobs is None for sequence in batch.sequences):
        return told  # nearly always
    row = 0
    for sequence in batch.sequences:
        request, positions = sequence.request, sequence.request.untold_positions(sequence.num_tokens)
        if request.prompt_logprobs is not None and positions:
            following = [request.token_ids[position + 1] for position in positions]
            rows = logits[row : row + len(positions)].cpu()
            told[request.request_id] = tuple(token_logprobs(rows, following, request.prompt_logprobs))
        row += len(sequence.logit_positions)
    return told
