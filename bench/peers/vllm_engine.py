"""vLLM's CPU engine at the work of `bench.engine`; runs in vLLM's environment. Prints rates by figure name.

Arguments: model folder, threads, context tokens, output tokens.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time

BEGAN = time.perf_counter()


def main() -> None:
    folder, threads, context, output = sys.argv[1], *map(int, sys.argv[2:])
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    from vllm import LLM, SamplingParams  # it reads the environment as it is imported

    llm = LLM(
        model=folder,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_seqs=64,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )
    dice = random.Random(0)

    def generate(batch: int, prompt: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": dice.choices(range(100, 30_000), k=prompt)} for _ in range(batch)]
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
        began = time.perf_counter()
        answers = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        if any(len(answer.outputs[0].token_ids) != tokens for answer in answers):
            raise SystemExit("an answer has another length than asked for")
        return seconds

    generate(1, 32, 1)
    figures = {"ready_s": time.perf_counter() - BEGAN}
    for length in (512, 2048):
        generate(1, length, 1)
        figures[f"prefill_{length}_tok_s"] = statistics.median(length / generate(1, length, 1) for _ in range(5))
    for batch in (1, 8, 32):
        generate(batch, context, 2)
        prompts_s = statistics.median(generate(batch, context, 1) for _ in range(3))
        rates = [batch * output / (generate(batch, context, output + 1) - prompts_s) for _ in range(5)]
        figures[f"decode_b{batch}_tok_s"] = statistics.median(rates)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
