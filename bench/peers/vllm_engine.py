"""vLLM's CPU engine at the work of `bench.engine`; runs in vLLM's environment. Prints rates by figure name.

Arguments: model folder, threads, context tokens, output tokens, dtype. A figure is the median of up to 5 runs, of fewer
where those take longer than `BUDGET_S`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

BUDGET_S = 30.0
BEGAN = time.perf_counter()


def main() -> None:
    folder, dtype, threads, context, output = sys.argv[1], sys.argv[5], *map(int, sys.argv[2:5])
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}" if threads > 1 else "0"
    from vllm import LLM, SamplingParams  # it reads the environment as it is imported

    llm = LLM(
        model=folder,
        dtype=dtype,
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
        figures[f"prefill_{length}_tok_s"] = length / median(partial(generate, 1, length, 1))
    for batch in (1, 8, 32):
        generate(batch, context, 2)
        prompts_s = median(partial(generate, batch, context, 1))
        seconds = median(partial(generate, batch, context, output + 1))
        figures[f"decode_b{batch}_tok_s"] = batch * output / (seconds - prompts_s)
    print(json.dumps(figures))


def median(run: Callable[[], float]) -> float:
    """Of the seconds of some runs, behind one that does not count unless it alone takes the budget."""
    began, times = time.perf_counter(), [run()]
    while len(times) < 6 and time.perf_counter() - began < BUDGET_S:
        times.append(run())
    return statistics.median(times[1:] or times)


if __name__ == "__main__":
    main()
