"""A model without weights that notices wrong KV, and a model folder for it. For engine and cluster tests.

`FakeModel` writes into the KV pool as a transformer does: layer 0 holds each token and its position, layer 1 a digest
of all that layer 0 holds up to there, *as read back through the block table*. The next token is a digest of layer 1,
read back the same way. So a block that is wrong, stale, missing or computed over a wrong prefix changes the tokens,
and `expected_output` says from the tokens alone what they must be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KvCache

VOCAB_SIZE = 512
EOS_TOKEN_ID = VOCAB_SIZE - 1
EOS_TEXT = "<eos>"
MAX_MODEL_LEN = 2048
NUM_LAYERS = 2
HEAD_DIM = 4
SPREAD = 2 * HEAD_DIM
"""K and V of one token and layer: code, code + 1, ..., code + 7."""

_CODE_MODULUS = VOCAB_SIZE * MAX_MODEL_LEN  # 2^20: codes stay exact in float32
_SHARES = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])  # how much each of the 8 numbers counts when they are read back


def fake_model_config(eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> ModelConfig:
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HEAD_DIM,
        intermediate_size=HEAD_DIM,
        num_layers=NUM_LAYERS,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        max_model_len=MAX_MODEL_LEN,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        eos_token_ids=eos_token_ids,
        bos_token_id=None,
    )


class FakeModel:
    """Deterministic `Model`: float32 KV of `NUM_LAYERS` layers, one head of `HEAD_DIM`.

    It never likes `EOS_TOKEN_ID` best; a test that wants an end of sequence names another token in `eos_token_ids`.
    `fault` is raised by the next forward, once, after it has written garbage where the batch's KV belongs.
    """

    def __init__(self, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> None:
        self.config = fake_model_config(eos_token_ids)
        self.fault: Exception | None = None
        self.num_forwards = 0
        self.num_tokens = 0

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:  # [len(sample_rows), vocab] float32
        self.num_forwards += 1
        self.num_tokens += len(batch.token_ids)
        wanted = set(batch.sample_rows)
        rows: list[torch.Tensor] = []
        for s, context_len in enumerate(batch.context_lens):
            start, end = batch.query_starts[s], batch.query_starts[s + 1]
            token_ids, positions = batch.token_ids[start:end], batch.positions[start:end]
            where = _addresses(batch.block_tables[s], context_len, kv.layout.block_size)
            if self.fault is not None:
                _write(kv, 0, where, positions, torch.full_like(positions, 77))
                continue
            _write(kv, 0, where, positions, token_ids * MAX_MODEL_LEN + positions)
            _write(kv, 1, where, positions, _digests(_read(kv, 0, where))[positions] % _CODE_MODULUS)
            digests = _digests(_read(kv, 1, where))
            rows += [_logits(int(digests[batch.positions[row]])) for row in range(start, end) if row in wanted]
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)


class FewWords(FakeModel):
    """Draws from 16 tokens, so that they come again."""

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        logits = super().forward(batch, kv)
        few = torch.full_like(logits, -100.0)
        few[:, :16] = logits.view(len(logits), -1, 16).sum(dim=1) / 100
        return few


def expected_output(prompt: Sequence[int], n: int, banned: Sequence[int] = ()) -> list[int]:
    """The `n` tokens that `FakeModel` must continue `prompt` with, worked out without any pool.

    `banned` tokens are never drawn: the runner-up of the logits takes their place.
    """
    tokens = list(prompt)
    first = second = 0  # running digests of layer 0 and layer 1
    for position in range(len(prompt) + n - 1):
        first += _as_read(tokens[position] * MAX_MODEL_LEN + position) * _weight(position)
        second += _as_read(first % _CODE_MODULUS) * _weight(position)
        if position >= len(prompt) - 1:
            tokens.append(next(t for t in _ranking(second) if t not in banned))
    return tokens[len(prompt) :]


def _addresses(block_table: list[int], context_len: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(block, offset) of the positions 0 to context_len - 1, each [context_len] int64."""
    positions = torch.arange(context_len)
    return torch.tensor(block_table)[positions // block_size], positions % block_size


def _write(
    kv: KvCache,
    layer: int,
    where: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,  # [T] int64
    codes: torch.Tensor,  # [T] int64
) -> None:
    blocks, offsets = where[0][positions], where[1][positions]
    values = (codes[:, None] + torch.arange(SPREAD)).float().view(-1, 2, HEAD_DIM)  # [T, 2 (K, V), head_dim]
    kv.pool[blocks, layer, :, 0, offsets] = values


def _read(kv: KvCache, layer: int, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:  # [context_len] int64
    values = kv.pool[where[0], layer, :, 0, where[1]]  # [context_len, 2 (K, V), head_dim]
    return (values.reshape(-1, SPREAD).long() * _SHARES).sum(dim=1)


def _digests(values: torch.Tensor) -> torch.Tensor:
    """[n] int64 -> [n] int64: entry i is a digest of the values 0 to i."""
    positions = torch.arange(len(values))
    return torch.cumsum(values * (positions * 40503 % 65521 + 1), dim=0)


def _as_read(code: int) -> int:
    return sum((code + i) * int(share) for i, share in enumerate(_SHARES))


def _weight(position: int) -> int:
    return position * 40503 % 65521 + 1


def _ranking(digest: int) -> tuple[int, int, int]:
    """The three best tokens, best first. None is `EOS_TOKEN_ID`."""
    best = digest // 7 % EOS_TOKEN_ID
    return best, (best + 1) % EOS_TOKEN_ID, (best + 2) % EOS_TOKEN_ID


def _logits(digest: int) -> torch.Tensor:
    logits = torch.zeros(VOCAB_SIZE)
    # So far apart that a draw at any usual temperature takes the best.
    logits[list(_ranking(digest))] = torch.tensor([300.0, 200.0, 100.0])
    return logits


def make_model_folder(folder: Path) -> Path:
    """Fill `folder` with all that a router and a tokenizer read of a model, to go with `FakeModel`.

    Byte-level vocabulary: ids below 256 are single bytes, in no particular order; those above are texts like "<300>".
    The chat template writes one line a message. The weights file is valid and empty. Returns `folder`.
    """
    config = fake_model_config()
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_model_len,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tie_word_embeddings,
            "eos_token_id": EOS_TOKEN_ID,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "eos_token": EOS_TEXT,
            "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
        },
    )
    vocab = {char: token_id for token_id, char in enumerate(sorted(ByteLevel.alphabet()))}
    vocab |= {f"<{token_id}>": token_id for token_id in range(len(vocab), EOS_TOKEN_ID)}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([EOS_TEXT])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value))
