"""A model as cheap as can be that notices wrong KV, and what it must give, worked out from the tokens alone.

Each position holds a code of its token (K) and a digest of all K and V before it, *as read back through the block
table* (V). The next token is a digest of the same, so a block that is wrong, stale or missing changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout

BLOCK_SIZE = 2
HEAD_DIM = 2
"""The least that a model may have. Only the first number of each is used."""
_V = BLOCK_SIZE * HEAD_DIM
VOCAB_SIZE = 16
MAX_MODEL_LEN = 16
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=HEAD_DIM, block_size=BLOCK_SIZE, dtype="float32")
MODEL_FAULT = "the model fails"
_MASK = 2**32 - 1


class TinyModel:
    """Writes 32-bit integers where a real model has its floats: nothing but links and this class touches them."""

    def __init__(self, writes: Callable[[int], None]) -> None:
        """`writes` is told of each block before it is written."""
        self.config = ModelConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            max_model_len=MAX_MODEL_LEN,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            tie_word_embeddings=True,
            eos_token_ids=(),
            bos_token_id=None,
        )
        self.fault: Exception | None = None
        """Raised by the next forward, once, after it has written garbage."""
        self._writes = writes

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:  # [len(sample_rows), vocab] float32
        token_ids, fault = batch.token_ids.tolist(), self.fault
        rows: list[int] = []
        wanted = set(batch.sample_rows)
        for table, context_len, start, end in zip(
            batch.block_tables, batch.context_lens, batch.query_starts, batch.query_starts[1:], strict=False
        ):
            digest, first = 0, context_len - (end - start)
            for position in range(context_len):
                block = table[position // BLOCK_SIZE]
                words = kv.block(block).cast("I")
                i = position % BLOCK_SIZE * HEAD_DIM
                if position >= first:
                    self._writes(block)
                    token = 77 if fault else token_ids[start + position - first]
                    words[i], words[_V + i] = _code(token, position), digest
                digest = _next(digest, words[i], words[_V + i])
            if end - 1 in wanted:
                rows.append(_token(digest))
        if fault is not None:
            self.fault = None
            raise fault
        logits = torch.zeros(len(rows), VOCAB_SIZE)
        logits[range(len(rows)), rows] = 1.0
        return logits


def expected_output(prompt: Sequence[int], n: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + n:
        tokens.append(_token(_words(tuple(tokens))[-1][2]))
    return tokens[len(prompt) :]


def expected_block(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """(offset in words, word) of all that the last block of `tokens` must hold."""
    begin = (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    words = _words(tuple(tokens))[begin:]
    return [pair for i, (k, v, _) in enumerate(words) for pair in ((HEAD_DIM * i, k), (_V + HEAD_DIM * i, v))]


@lru_cache(maxsize=4096)
def _words(tokens: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """K, V and digest up to there, of each position."""
    words, digest = [], 0
    for position, token in enumerate(tokens):
        k, v = _code(token, position), digest
        digest = _next(digest, k, v)
        words.append((k, v, digest))
    return words


def _code(token: int, position: int) -> int:
    return (token + 1) * 0x9E3779B1 + position & _MASK


def _next(digest: int, k: int, v: int) -> int:
    return (digest * 0x85EBCA6B ^ k * 31 + v) + 1 & _MASK


def _token(digest: int) -> int:
    return (digest >> 8) % VOCAB_SIZE
