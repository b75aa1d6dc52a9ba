"""Drawing tokens on a GPU: the choice of `engine.sampler`, row by row, without a sort.

A token is found by its place in the order of likelihood: the logit at which the weights of all that are at least as
likely pass a number. Halving the range of a float32's bits finds that logit in 32 sweeps over the row, which stays in
L2; tokens of one logit count in the order of their ids. Random bits are those of `engine.philox`, to the last one.
Weights and their sums are float64, as they are there: the token differs only where the draw falls within about 1e-14 of
the border between two, because sums are taken in another order.

Bans, biases and penalties change the logits before, by `adjust`, to the bits that `engine.sampler` makes of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_ENTRIES = 256


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Ten rounds over uint32: `engine.philox.philox4x32`."""
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        low0, low1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def uniform(seed, position):
    """Both int64, read as unsigned -> the float64 of `engine.sampler.uniform`."""
    seed, position = seed.to(tl.uint64), position.to(tl.uint64)
    zero = (position * 0).to(tl.uint32)
    low, high, _, _ = philox4x32(
        position.to(tl.uint32), (position >> 32).to(tl.uint32), zero, zero,
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )  # fmt: skip
    bits = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def uniform_kernel(seeds_ptr, positions_ptr, out_ptr):
    """Grid (n): for tests and `gpu-check`."""
    row = tl.program_id(0)
    tl.store(out_ptr + row, uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)))


@triton.jit
def _key(logits):
    """float32 -> int64 in the same order; both zeros are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _weight(logits, peak, inverse_temperature, min_p):
    """float64, relative to that of the peak; 0 for tokens that min-p leaves out."""
    weights = tl.exp((logits.to(tl.float64) - peak.to(tl.float64)) * inverse_temperature)
    return tl.where(weights < min_p, 0.0, weights)


@triton.jit
def adjust_kernel(
    logits_ptr,  # [n, vocab] float32, by stride; changed in place
    starts_ptr,  # [n + 1] int32: which of the entries are a row's
    ids_ptr,  # [entries] int32: tokens, each once in a row
    biases_ptr,  # [entries] float32; -inf: banned
    penalties_ptr,  # [entries] float32, of repetition; 1: none
    subtracted_ptr,  # [entries] float32, for presence and frequency
    row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n). A row with NaN or +inf keeps one of the two."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    end = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), end, BLOCK):
        entries = first + tl.arange(0, BLOCK)
        mask = entries < end
        ids = tl.load(ids_ptr + entries, mask=mask, other=0)
        logits = tl.load(row_ptr + ids, mask=mask, other=0.0) + tl.load(biases_ptr + entries, mask=mask, other=0.0)
        penalty = tl.load(penalties_ptr + entries, mask=mask, other=1.0).to(tl.float64)
        # By way of float64, which rounds a float32 quotient and product as IEEE says, and is fused with nothing.
        wide = logits.to(tl.float64)
        logits = tl.where(logits > 0, wide / penalty, wide * penalty).to(tl.float32)
        logits -= tl.load(subtracted_ptr + entries, mask=mask, other=0.0)
        tl.store(row_ptr + ids, logits, mask=mask)


@triton.jit
def _from(row_ptr, vocab, key, peak, inverse_temperature, min_p, BLOCK: tl.constexpr):
    """How many tokens are at least as likely as `key` says, and their weight: int64, float64."""
    count, weight = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        kept = (_key(logits) >= key) & (ids < vocab)
        count += tl.sum(kept.to(tl.int64), axis=0)
        weight += tl.sum(tl.where(kept, _weight(logits, peak, inverse_temperature, min_p), 0.0), axis=0)
    return count, weight


@triton.jit
def _last_key(
    row_ptr, vocab, low, high, least_count, least, peak, inverse_temperature, min_p, STRICT, BLOCK: tl.constexpr
):  # fmt: skip
    """The largest key from which on there are `least_count` tokens of weight `least` (more than it, if STRICT).

    `low` if there is no larger one; `high` is the largest that is looked at.
    """
    for _ in range(0, 34):
        middle = low + ((high - low + 1) >> 1)
        count, weight = _from(row_ptr, vocab, middle, peak, inverse_temperature, min_p, BLOCK)
        enough = (count >= least_count) & tl.where(STRICT, weight > least, weight >= least)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, tl.maximum(middle - 1, low))
    return low


@triton.jit
def _nth_of(row_ptr, vocab, key, n, BLOCK: tl.constexpr):
    """The id of the n-th token (from 0) with this key, in the order of ids."""
    found, before = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        equal = ((_key(logits) == key) & (ids < vocab)).to(tl.int64)
        place = before + tl.cumsum(equal, axis=0) - 1
        found = tl.maximum(found, tl.max(tl.where((equal == 1) & (place == n), ids, -1).to(tl.int64), axis=0))
        before += tl.sum(equal, axis=0)
    return found


@triton.jit
def _by_id(row_ptr, vocab, target, peak, inverse_temperature, min_p, BLOCK: tl.constexpr):
    """The first token with which the weights, summed in the order of ids, exceed `target`."""
    found, before = tl.full([], -1, tl.int64), tl.full([], 0.0, tl.float64)
    last = tl.full([], -1, tl.int64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        weights = tl.where(ids < vocab, _weight(logits, peak, inverse_temperature, min_p), 0.0)
        beyond = (before + tl.cumsum(weights, axis=0) > target) & (weights > 0.0)
        first = tl.min(tl.where(beyond, ids, 2147483647).to(tl.int64), axis=0)
        found = tl.where((found < 0) & (first < 2147483647), first, found)
        last = tl.maximum(last, tl.max(tl.where(weights > 0.0, ids, -1).to(tl.int64), axis=0))
        before += tl.sum(weights, axis=0)
    return tl.where(found < 0, last, found)  # rounding put the target at the very end


@triton.jit
def _by_likelihood(
    row_ptr, vocab, peak, inverse_temperature, min_p, draw, top_k, top_p, BLOCK: tl.constexpr
):  # fmt: skip
    lowest, peak_key = tl.full([], -2147483648, tl.int64), _key(peak)
    # The k-th most likely token's key, how many of its ties belong to the first k, and the weight of those.
    limited = (top_k > 0) & (top_k < vocab)
    wanted_count = tl.where(limited, top_k, 1).to(tl.int64)
    floor = lowest
    if limited:
        floor = _last_key(
            row_ptr, vocab, lowest, peak_key, wanted_count, 0.0, peak, inverse_temperature, min_p, False, BLOCK
        )
    count, total = _from(row_ptr, vocab, floor + 1, peak, inverse_temperature, min_p, BLOCK)
    with_ties, weight_with_ties = _from(row_ptr, vocab, floor, peak, inverse_temperature, min_p, BLOCK)
    num_ties = tl.where(limited, wanted_count - count, with_ties - count)
    each = (weight_with_ties - total) / tl.maximum(with_ties - count, 1)
    total += each * num_ties
    # The nucleus: the key of its last token, and how many of that key's ties belong to it.
    wanted = top_p * total
    edge = _last_key(row_ptr, vocab, floor, peak_key, 1, wanted, peak, inverse_temperature, min_p, False, BLOCK)
    count, weight = _from(row_ptr, vocab, edge + 1, peak, inverse_temperature, min_p, BLOCK)
    with_ties, weight_with_ties = _from(row_ptr, vocab, edge, peak, inverse_temperature, min_p, BLOCK)
    each = (weight_with_ties - weight) / tl.maximum(with_ties - count, 1)
    most = tl.where(edge == floor, num_ties, with_ties - count)
    needed = tl.ceil((wanted - weight) / tl.where(each > 0.0, each, 1.0)).to(tl.int64)
    num_ties = tl.minimum(tl.maximum(needed, 1), most)
    # The draw: where the weights pass its share of the nucleus.
    target = draw * (weight + each * num_ties)
    key = _last_key(row_ptr, vocab, edge, peak_key, 1, target, peak, inverse_temperature, min_p, True, BLOCK)
    count, weight = _from(row_ptr, vocab, key + 1, peak, inverse_temperature, min_p, BLOCK)
    with_ties, weight_with_ties = _from(row_ptr, vocab, key, peak, inverse_temperature, min_p, BLOCK)
    each = (weight_with_ties - weight) / tl.maximum(with_ties - count, 1)
    most = tl.where(key == edge, num_ties, with_ties - count)
    n = ((target - weight) / tl.where(each > 0.0, each, 1.0)).to(tl.int64)
    return _nth_of(row_ptr, vocab, key, tl.minimum(tl.maximum(n, 0), most - 1), BLOCK)


@triton.jit
def sample_kernel(
    logits_ptr,  # [n, vocab] float32, by stride
    inverse_temperatures_ptr,  # [n] float64; 0: the most likely token
    top_ps_ptr,  # [n] float64; 1: all
    min_ps_ptr,  # [n] float64; 0: all
    top_ks_ptr,  # [n] int64; 0: all
    seeds_ptr, positions_ptr,  # [n] int64: the bits of unsigned numbers
    out_ptr,  # [n] int64: a token; -1 where the row holds NaN or +inf, -2 where it holds nothing but -inf
    vocab, row_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (n). vocab x 4 bytes for each sweep: 2 if greedy, 3 without top-k and top-p, else some 80 or 110, in L2."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    peak, best, sound = tl.full([], -float("inf"), tl.float32), tl.full([], -1, tl.int64), tl.full([], 1, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + ids, mask=ids < vocab, other=-float("inf"))
        sound = tl.minimum(sound, tl.min(((logits == logits) & (logits < float("inf"))).to(tl.int32), axis=0))
        largest = tl.max(logits, axis=0)
        first = tl.min(tl.where(logits == largest, ids, 2147483647).to(tl.int64), axis=0)
        best = tl.where(largest > peak, first, best)
        peak = tl.maximum(peak, largest)
    inverse_temperature, top_k = tl.load(inverse_temperatures_ptr + row), tl.load(top_ks_ptr + row)
    top_p, min_p = tl.load(top_ps_ptr + row), tl.load(min_ps_ptr + row)
    token = tl.where(sound == 0, -1, tl.where(peak > -float("inf"), best, -2))
    if (token >= 0) & (inverse_temperature > 0.0):
        draw = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        if ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0):
            token = _by_likelihood(row_ptr, vocab, peak, inverse_temperature, min_p, draw, top_k, top_p, BLOCK)
        else:
            _, total = _from(row_ptr, vocab, _key(peak) * 0 - 2147483648, peak, inverse_temperature, min_p, BLOCK)
            token = _by_id(row_ptr, vocab, draw * total, peak, inverse_temperature, min_p, BLOCK)
    tl.store(out_ptr + row, token)


def sample(
    logits: torch.Tensor,  # [n, vocab] float32, rows contiguous; what must not be drawn is -inf
    inverse_temperatures: torch.Tensor,  # [n] float64; 0: the most likely token
    top_ps: torch.Tensor,  # [n] float64
    min_ps: torch.Tensor,  # [n] float64
    top_ks: torch.Tensor,  # [n] int64
    seeds: torch.Tensor,  # [n] int64, the bits of an unsigned number
    positions: torch.Tensor,  # [n] int64
) -> torch.Tensor:  # [n] int64: a token, or less than 0 where `engine.sampler.sample` has none
    num_rows, vocab = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(num_rows,)](
        logits, inverse_temperatures, top_ps, min_ps, top_ks, seeds, positions, out, vocab, logits.stride(0),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return out


def adjust(
    logits: torch.Tensor,  # [n, vocab] float32, rows contiguous; changed in place
    starts: torch.Tensor,  # [n + 1] int32
    ids: torch.Tensor,  # [entries] int32
    biases: torch.Tensor,  # [entries] float32
    penalties: torch.Tensor,  # [entries] float32
    subtracted: torch.Tensor,  # [entries] float32
) -> None:
    """See `adjust_kernel`."""
    adjust_kernel[(len(logits),)](
        logits, starts, ids, biases, penalties, subtracted, logits.stride(0), BLOCK=_ENTRIES
    )  # fmt: skip
