"""Hugging Face transformers' logits for tiny random models of each family that we run: `tests/data/families`.

    .venv-peers/transformers/bin/python bench/peers/family_goldens.py tests/data/families [--compare]

Writes a file for each model: weights in bfloat16, which transformers computed with in float32; a sequence of tokens and
the logits after each of them; what greedy decoding makes of its beginning; and, as metadata, config.json and versions.
`--compare` makes them again in memory and says how far they are from those that lie there, which it leaves alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

NUM_TOKENS, NUM_PROMPT, NUM_GREEDY = 100, 40, 24
LEAST_MARGIN = 2e-3
"""Between the best two tokens of a greedy step: less could be turned round by another order of summation."""

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3 = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "sliding_window": 24,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": {"model_type": "llama", "num_key_value_heads": 3, "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, **_LLAMA3}, "tie_word_embeddings": False},
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0},
    },
    "smollm2": {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 24, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA3,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3_soft_cap": {
        "model_type": "gemma3_text",
        **_GEMMA3,
        "query_pre_attn_scalar": 16,  # of these two GGUF knows nothing else
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 6.0,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    arguments = parser.parse_args()
    for name in arguments.only:
        tensors, metadata = make(name)
        path = arguments.folder / f"{name}.safetensors"
        if arguments.compare:
            print(json.dumps({"family": name, **difference(path, tensors)}))
        else:
            save_file(tensors, path, metadata)
            print(f"{path}: {path.stat().st_size} bytes")


def make(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """With the first seed whose greedy steps leave no doubt."""
    config = AutoConfig.for_model(**{**_COMMON, **FAMILIES[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        _randomize(model, generator)
        token_ids = torch.randint(3, config.vocab_size, (1, NUM_TOKENS), generator=generator)
        greedy, margin = _greedy(model, token_ids[:, :NUM_PROMPT])
        if margin > LEAST_MARGIN:
            break
    with torch.inference_mode():
        logits = model(token_ids).logits[0]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key).bfloat16() for key in file.keys()}  # noqa: SIM118
        saved = json.loads((Path(folder) / "config.json").read_text())
    tensors |= {"golden.token_ids": token_ids[0], "golden.logits": logits, "golden.greedy": torch.tensor(greedy)}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return tensors, {"config": json.dumps(saved), "versions": json.dumps(versions), "num_prompt": str(NUM_PROMPT)}


def _randomize(model: Any, generator: torch.Generator) -> None:
    """Far from uniform, and exact in bfloat16. Norms of Gemma are stored as what they differ from 1."""
    offset = 0.0 if model.config.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = offset + 0.25 * values
            elif name.endswith("bias"):
                values *= 0.5
            else:
                values *= 1.5 / parameter.shape[1] ** 0.5
            parameter.copy_(values.bfloat16().float())


@torch.inference_mode()
def _greedy(model: Any, token_ids: torch.Tensor) -> tuple[list[int], float]:
    """Tokens, each from the whole sequence before it, and the least distance between the best two."""
    margin = float("inf")
    for _ in range(NUM_GREEDY):
        best = model(token_ids).logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        token_ids = torch.cat((token_ids, best.indices[:1].view(1, 1)), dim=1)
    return token_ids[0, -NUM_GREEDY:].tolist(), margin


def difference(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    if stored.keys() != tensors.keys():
        return {"names": sorted(stored.keys() ^ tensors.keys())}
    furthest = {name: float((stored[name].double() - tensors[name].double()).abs().max()) for name in stored}
    return {"logits": furthest.pop("golden.logits"), "all_others": max(furthest.values())}


if __name__ == "__main__":
    main()
