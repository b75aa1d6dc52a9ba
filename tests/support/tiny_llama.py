"""Small Llama models with seeded random weights, their checkpoints on disk, and a runner over paged KV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.decoder import DecoderModel, DecoderWeights, Model

Tensors = dict[str, npt.NDArray[np.float32]]

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=1,
)


def random_tensors(config: ModelConfig, seed: int = 0) -> Tensors:
    """A checkpoint for `config`, scaled so that attention and logits are far from uniform."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, gain / columns**0.5, (rows, columns)).astype(np.float32)

    def norm(size: int = config.hidden_size) -> npt.NDArray[np.float32]:
        return (rng.uniform(0.5, 1.5, size) - config.norm_offset).astype(np.float32)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    tensors = {"model.embed_tokens.weight": matrix(config.vocab_size, hidden, 3.0), "model.norm.weight": norm()}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = matrix(config.vocab_size, hidden, 3.0)
    for i in range(config.num_layers):
        shapes = {
            "self_attn.q_proj": (q_rows, hidden),
            "self_attn.k_proj": (kv_rows, hidden),
            "self_attn.v_proj": (kv_rows, hidden),
            "self_attn.o_proj": (hidden, q_rows),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        tensors |= {
            f"model.layers.{i}.{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")
        }
        if config.post_norms:
            names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
            tensors |= {f"model.layers.{i}.{name}.weight": norm() for name in names}
        if config.qk_norm:
            tensors |= {f"model.layers.{i}.self_attn.{name}_norm.weight": norm(config.head_dim) for name in "qk"}
        if config.qkv_bias:
            tensors |= {
                f"model.layers.{i}.self_attn.{n}_proj.bias": matrix(1, shapes[f"self_attn.{n}_proj"][0], 9.0)[0]
                for n in "qkv"
            }
    return tensors


def model_of(
    config: ModelConfig, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: str = "float32"
) -> DecoderModel:
    return DecoderModel(config, weights_of(config, tensors, dtype))


def weights_of(config: ModelConfig, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: str) -> DecoderWeights:
    weights = DecoderWeights(config, getattr(torch, dtype))
    for name, part in weights.parts().items():
        part.copy_(torch.from_numpy(tensors[name]))
    return weights


def write_checkpoint(folder: Path, config: ModelConfig, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """A model folder in Hugging Face's layout: config.json and one model.safetensors."""
    scaling = config.rope_scaling
    fields = {
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
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **asdict(scaling)},
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids),
        "bos_token_id": config.bos_token_id,
        "hidden_act": "silu",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(dict(tensors), folder / "model.safetensors")


class PagedRunner:
    """Feeds token sequences to a model in chunks, over a pool that starts full of NaN.

    Each sequence gets its own blocks, scattered over the pool: whatever reads another slot shows at once.
    """

    def __init__(self, model: Model, *, block_size: int, num_blocks: int = 96, dtype: str = "float32") -> None:
        self.model = model
        config = model.config
        self.kv = KvCache(
            KvLayout(
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                block_size=block_size,
                dtype=dtype,
            ),
            num_blocks,
        )
        fill_with_nan(self.kv)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    def forward(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """One step: for each sequence its next tokens; returns the logits after every one of them: [n, vocab]."""
        positions: list[int] = []
        starts, context_lens = [0], []
        for name, token_ids in chunks.items():
            done = self._computed.get(name, 0)
            positions += range(done, done + len(token_ids))
            starts.append(starts[-1] + len(token_ids))
            context_lens.append(done + len(token_ids))
            self._computed[name] = context_lens[-1]
            self._grow(name)
        batch = ForwardBatch(
            token_ids=torch.tensor([token_id for token_ids in chunks.values() for token_id in token_ids]),
            positions=torch.tensor(positions),
            query_starts=starts,
            context_lens=context_lens,
            block_tables=[self._tables[name] for name in chunks],
            sample_rows=list(range(starts[-1])),
        )
        logits = self.model.forward(batch, self.kv)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(chunks)}

    def run(self, name: str, token_ids: Sequence[int], chunk_sizes: Sequence[int]) -> torch.Tensor:
        """Feed `token_ids` in chunks of the given sizes, which add up to their number; all logits: [n, vocab]."""
        parts, start = [], 0
        for size in chunk_sizes:
            parts.append(self.forward({name: token_ids[start : start + size]})[name])
            start += size
        assert start == len(token_ids)
        return torch.cat(parts)

    def _grow(self, name: str) -> None:
        table = self._tables.setdefault(name, [])
        while len(table) * self.kv.layout.block_size < self._computed[name]:
            table.append(self._free.pop())


def fill_with_nan(kv: KvCache) -> None:
    """Whatever is read before it is written is NaN."""
    if kv.scales is None:
        kv.pool.fill_(torch.nan)
    else:
        kv.pool.view(torch.int8).fill_(0x7F)  # NaN, as FP8
        kv.scales.fill_(torch.nan)


def with_heads(num_heads: int, num_kv_heads: int) -> ModelConfig:
    return replace(TINY, num_heads=num_heads, num_kv_heads=num_kv_heads)
