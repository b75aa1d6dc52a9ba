"""Turns logits into tokens. A draw depends on its row, seed and position alone: never on the batch or on past draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import InternalError, NotFinite
from engine.philox import philox4x32
from engine.request import Request
from engine.sampling_params import SamplingParams

_HEAD = 1024
"""Tokens sorted first when only the most likely are wanted; nearly always enough for top-p."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to draw one row's token."""

    params: SamplingParams
    position: int
    """Of the token to be drawn, in prompt plus output; the counter of the random stream."""
    banned_token_ids: tuple[int, ...] = ()
    """Never drawn, whatever their logits; ids outside the vocabulary are ignored."""
    prompt: Sequence[int] = ()
    """Token ids for the penalties; not needed without. All are in the vocabulary."""
    output: Sequence[int] = ()
    """The same, of the tokens drawn so far."""

    @property
    def takes_the_best(self) -> bool:
        """Whether the token is that of the largest logit, and nothing else matters."""
        params = self.params
        return params.greedy and not (params.penalizes or params.logit_bias)


def sample_row(request: Request, eos_token_ids: tuple[int, ...]) -> SampleRow:
    """For the next token of `request`."""
    params, tokens, num_prompt = request.params, request.token_ids, request.num_prompt_tokens
    banned = request.banned_token_ids(eos_token_ids)
    if not params.penalizes:
        return SampleRow(params, len(tokens), banned)
    return SampleRow(params, len(tokens), banned, tokens[:num_prompt], tokens[num_prompt:])


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own distribution: before temperature, truncation, bans,
    biases and penalties."""

    logprob: float
    """Of the sampled token."""
    top: tuple[tuple[int, float], ...]
    """(token id, logprob) of the most likely tokens, best first, the lowest id first among equal logits."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None = None


def sample(
    logits: torch.Tensor,  # [n, vocab] float32, left unchanged
    rows: Sequence[SampleRow],  # n
) -> list[SampledToken | InternalError]:
    """Draw one token for each row.

    In place of a token there is the reason why there is none: the row's logits hold NaN or +inf, all its tokens are
    banned, or it is to be drawn at random without a seed. Never a token that the model did not mean, and never an
    end of the other rows. Raises `InternalError` if there are not as many rows as logits.
    """
    if logits.shape[0] != len(rows):
        raise InternalError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    values = logits.numpy()  # numpy's argmax takes a tenth of torch's time, and promises the first of equals
    best_ids = values.argmax(axis=-1).tolist()
    return [_sample_row(values[i], row, best_ids[i]) for i, row in enumerate(rows)]


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of tokens that are known: one for each row of `logits` [n, vocab] float32."""
    values = logits.numpy()
    return [_logprobs(values[i], token_id, num_top) for i, token_id in enumerate(token_ids)]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at `position`; both arguments are below 2^64."""
    counter = (position & 0xFFFFFFFF, position >> 32, 0, 0)
    low, high, _, _ = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))
    return ((high << 32 | low) >> 11) * 2.0**-53


def _sample_row(logits: npt.NDArray[np.float32], row: SampleRow, best_id: int) -> SampledToken | InternalError:
    if not np.isfinite(logits[best_id]):  # a NaN anywhere is the row's argmax
        return NotFinite(f"position {row.position}: the largest logit is {logits[best_id]}")
    token_id = best_id
    if not row.takes_the_best or best_id in row.banned_token_ids:
        drawn = _draw(logits, row)
        if isinstance(drawn, InternalError):
            return drawn
        token_id = drawn
    if row.params.logprobs is None:
        return SampledToken(token_id)
    return SampledToken(token_id, _logprobs(logits, token_id, row.params.logprobs))


def _draw(logits: npt.NDArray[np.float32], row: SampleRow) -> int | InternalError:
    logits = _adjusted(logits, row)
    best = int(logits.argmax())
    if logits[best] == -np.inf:
        return InternalError(f"position {row.position}: every token is banned or impossible")
    if row.params.greedy:
        return best
    if row.params.seed is None:
        return InternalError(f"position {row.position}: a random draw without a seed")
    ids, weights = _candidates(logits, row.params)
    cumulative = np.cumsum(weights)
    # uniform() < 1 and float64 rounding keep the product below the total, so there is always a token above it.
    drawn = int(np.searchsorted(cumulative, uniform(row.params.seed, row.position) * cumulative[-1], side="right"))
    return drawn if ids is None else int(ids[drawn])


def _adjusted(logits: npt.NDArray[np.float32], row: SampleRow) -> npt.NDArray[np.float32]:
    """With bans, biases and penalties, in this order; the row itself if there are none."""
    params, size = row.params, len(logits)
    banned = [token_id for token_id in row.banned_token_ids if 0 <= token_id < size]
    if not (banned or params.logit_bias or params.penalizes):
        return logits
    logits = logits.copy()
    logits[banned] = -np.inf
    if biases := {token_id: bias for token_id, bias in params.logit_bias if token_id < size}:
        logits[list(biases)] += np.array(list(biases.values()), np.float32)
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.array([*row.prompt, *row.output], np.int64))
        penalty, values = np.float32(params.repetition_penalty), logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if row.output and (params.presence_penalty or params.frequency_penalty):
        drawn, counts = np.unique(np.array(row.output, np.int64), return_counts=True)
        logits[drawn] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
    return logits


def _candidates(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.float64]]:
    """Tokens that may be drawn, with their unnormalised probabilities; None for the ids stands for all, in order."""
    if 0 < params.top_k < len(logits):
        ids = _most_likely(logits, params.top_k)[: params.top_k]
        weights = _weights(logits[ids], logits[ids[0]], params)
        return _nucleus(ids, weights, params.top_p * float(weights.sum()))
    weights = _weights(logits, logits.max(), params)
    if params.top_p == 1.0:
        return None, weights
    wanted = params.top_p * float(weights.sum())
    head = min(_HEAD, len(logits))
    while True:
        ids = _most_likely(logits, head)
        if len(ids) == len(logits) or float(np.cumsum(weights[ids])[-1]) >= wanted:
            return _nucleus(ids, weights[ids], wanted)
        head = min(8 * head, len(logits))


def _weights(logits: npt.NDArray[np.float32], peak: np.float32, params: SamplingParams) -> npt.NDArray[np.float64]:
    """Relative to that of the peak, which is the most likely token; 0 for those that `min_p` leaves out."""
    scaled = np.subtract(logits, peak, dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the peak to -inf, which is its meaning
        scaled /= params.temperature
    weights = np.exp(scaled, out=scaled)
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    return weights


def _most_likely(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """At least `count` ids, best first, the lowest id first among equals; all that equal the last one are there."""
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= threshold)
    return ids[np.argsort(-logits[ids], kind="stable")]


def _nucleus(
    ids: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], wanted: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The shortest head of `ids` (best first) whose weights reach `wanted`; all of them if rounding is in the way."""
    kept = int(np.searchsorted(np.cumsum(weights), wanted, side="left")) + 1
    return ids[:kept], weights[:kept]


def _logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    # Row by row: a sum over a whole batch could be split differently, and change in its last bits with the batch.
    top_ids = _most_likely(logits, min(num_top, len(logits)))[:num_top] if num_top else np.empty(0, np.int64)
    chosen = logits[np.append(top_ids, token_id)]
    *top, logprob = (chosen - torch.from_numpy(logits).logsumexp(dim=-1).numpy()).tolist()
    return TokenLogprobs(logprob, tuple(zip(top_ids.tolist(), top, strict=True)))
