"""Hugging Face transformers' generate at the work of `bench.engine`. Prints rates by figure name.

Arguments: model folder, threads, context tokens, output tokens, dtype.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM

BEGAN = time.perf_counter()


def main() -> None:
    folder, dtype, threads, context, output = sys.argv[1], sys.argv[5], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def generate(batch: int, prompt: int, tokens: int) -> float:
        ids = torch.randint(100, 30_000, (batch, prompt))
        began = time.perf_counter()
        answer = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        seconds = time.perf_counter() - began
        if answer.shape[1] != prompt + tokens:
            raise SystemExit("an answer has another length than asked for")
        return seconds

    generate(1, 32, 1)
    figures = {"ready_s": time.perf_counter() - BEGAN}
    for length in (512, 2048):
        figures[f"prefill_{length}_tok_s"] = statistics.median(length / generate(1, length, 1) for _ in range(3))
    for batch in (1, 8, 32):
        prompts_s = statistics.median(generate(batch, context, 1) for _ in range(3))
        rates = [batch * output / (generate(batch, context, output + 1) - prompts_s) for _ in range(3)]
        figures[f"decode_b{batch}_tok_s"] = statistics.median(rates)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
