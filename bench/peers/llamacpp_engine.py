"""llama.cpp at the work of `bench.engine`, by its C functions. Prints rates by figure name.

Arguments: model folder, threads, context tokens, output tokens; a type follows, which is not asked for.

The model is written as GGUF once, in bfloat16 and in Q8_0, inside the environment. Rates with Q8_0 have the names of
ours with int8 weights.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI
from gguf import GGMLQuantizationType, GGUFWriter, quants

C = """
struct llama_model_params {
    void *devices, *tensor_buft_overrides;
    int32_t n_gpu_layers;
    int split_mode, load_mode, lazy_mode;
    int32_t main_gpu;
    const float *tensor_split;
    void *progress_callback, *progress_callback_user_data, *kv_overrides;
    bool vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp;
};
struct llama_context_params {
    uint32_t n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq;
    int32_t n_threads, n_threads_batch;
    int ctx_type, rope_scaling_type, pooling_type, attention_type, flash_attn_type;
    float rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow;
    uint32_t yarn_orig_ctx;
    float defrag_thold;
    void *cb_eval, *cb_eval_user_data;
    int type_k, type_v;
    size_t moe_cache_size;
    void *abort_callback, *abort_callback_data;
    bool embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified;
    void *samplers;
    size_t n_samplers;
    void *ctx_other;
};
struct llama_batch {
    int32_t n_tokens;
    int32_t *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
};
struct llama_model_params llama_model_default_params(void);
struct llama_context_params llama_context_default_params(void);
void *llama_model_load_from_file(const char *path, struct llama_model_params params);
void llama_model_free(void *model);
void *llama_init_from_model(void *model, struct llama_context_params params);
void llama_free(void *context);
void *llama_get_memory(void *context);
void llama_memory_clear(void *memory, bool data);
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(void *context, struct llama_batch batch);
float *llama_get_logits_ith(void *context, int32_t i);
"""
"""From llama.h of that build."""
FOREIGN = FFI()
FOREIGN.cdef(C)
STREAMS = 32
BATCH = 2048
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def library() -> Any:
    """Opened without its Python, which opens a server's worth of modules."""
    for path in Path(sys.prefix).glob("lib/python*/site-packages/xllamacpp/*.so"):
        return FOREIGN.dlopen(str(path))
    raise SystemExit("xllamacpp has no library")


def tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and values, as uint16, of each bfloat16 tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        data = np.memmap(path, np.uint8, "r", 8 + size)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise SystemExit(f"{name} is {entry['dtype']}, not bfloat16")
            start, end = entry["data_offsets"]
            yield name, data[start:end].view(np.uint16).reshape(entry["shape"])


def in_gguf(name: str) -> str:
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[name]
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"


def turned(values: Any, heads: int) -> Any:
    """Rows of queries or keys as GGUF has them: the two that turn together side by side."""
    return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)


def write_gguf(folder: Path, to: Path, kind: GGMLQuantizationType) -> None:
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise SystemExit(f"{folder} holds no Llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(to, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors(folder):
        if values.ndim == 1:
            writer.add_tensor(in_gguf(name), (values.astype(np.uint32) << 16).view(np.float32))
            continue
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:
                values = turned(values, count)
        if kind is GGMLQuantizationType.Q8_0:
            raw = quants.quantize((values.astype(np.uint32) << 16).view(np.float32), kind)
        else:
            raw = np.ascontiguousarray(values).view(np.uint8)
        writer.add_tensor(in_gguf(name), raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_file(folder: Path, kind: GGMLQuantizationType) -> Path:
    changed = max(path.stat().st_mtime_ns for path in folder.glob("*.safetensors"))
    path = Path(sys.prefix) / f"{folder.name}-{changed}-{kind.name}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        write_gguf(folder, unfinished, kind)
        unfinished.rename(path)
    return path


class Llama:
    """One model with room for `STREAMS` streams."""

    def __init__(self, path: Path, threads: int, context: int, vocab: int) -> None:
        self._lib, self._vocab = library(), vocab
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = max(STREAMS * context, 2 * BATCH), BATCH, 512
        params.n_seq_max, params.kv_unified = STREAMS, True
        params.n_threads = params.n_threads_batch = threads
        self._context = self._lib.llama_init_from_model(self._model, params)
        if self._context == FOREIGN.NULL:
            raise SystemExit(f"llama.cpp cannot run {path}")
        self._batch = self._lib.llama_batch_init(BATCH, 0, 1)

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Greedy, all streams together."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        work = [(s, i, token) for s, prompt in enumerate(prompts) for i, token in enumerate(prompt)]
        last = {s: len(prompt) - 1 for s, prompt in enumerate(prompts)}
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(work), BATCH):
            for s, token in self._decode(work[start : start + BATCH], last).items():
                answers[s].append(token)
        for step in range(1, tokens):
            last = {s: len(prompt) + step - 1 for s, prompt in enumerate(prompts)}
            work = [(s, last[s], answer[-1]) for s, answer in enumerate(answers)]
            for s, token in self._decode(work, last).items():
                answers[s].append(token)
        return answers

    def _decode(self, work: Sequence[tuple[int, int, int]], last: dict[int, int]) -> dict[int, int]:
        """Of the streams whose last position is among `work`, the most likely next token."""
        batch, wanted = self._batch, {}
        batch.n_tokens = len(work)
        for i, (stream, position, token) in enumerate(work):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
            batch.logits[i] = position == last[stream]
            if position == last[stream]:
                wanted[stream] = i
        if self._lib.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode")
        drawn = {}
        for stream, i in wanted.items():
            logits = self._lib.llama_get_logits_ith(self._context, i)
            drawn[stream] = int(np.frombuffer(FOREIGN.buffer(logits, 4 * self._vocab), np.float32).argmax())
        return drawn


def measure(llama: Llama, context: int, output: int, int8: str) -> dict[str, float]:
    """`int8`: "_int8" where the weights are that, else empty."""
    dice = random.Random(0)

    def generate(batch: int, prompt: int, tokens: int) -> float:
        prompts = [dice.choices(range(100, 30_000), k=prompt) for _ in range(batch)]
        began = time.perf_counter()
        llama.generate(prompts, tokens)
        return time.perf_counter() - began

    figures = {}
    for length in (512, 2048):
        generate(1, length, 1)
        figures[f"prefill_{length}{int8}"] = statistics.median(length / generate(1, length, 1) for _ in range(3))
    for batch in (1, 8, 32):
        generate(batch, context, 2)
        prompts_s = statistics.median(generate(batch, context, 1) for _ in range(3))
        rates = [batch * output / (generate(batch, context, output + 1) - prompts_s) for _ in range(3)]
        figures[f"{int8 or 'decode'}_b{batch}".removeprefix("_")] = statistics.median(rates)
    return figures


def main() -> None:
    folder, threads, context, output = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    figures = {}
    for suffix, kind in (("", GGMLQuantizationType.BF16), ("_int8", GGMLQuantizationType.Q8_0)):
        path = gguf_file(folder, kind)
        began = time.perf_counter()
        llama = Llama(path, threads, context + output + 16, vocab)
        llama.generate([[1] * 32], 1)
        figures[f"ready{suffix}_s"] = time.perf_counter() - began
        figures |= {f"{name}_tok_s": rate for name, rate in measure(llama, context, output, suffix).items()}
        llama.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
