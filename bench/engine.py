"""How fast does one engine compute, beside other engines in the same run?

`python -m bench.engine [--json] [--threads N] [--runs N] [--peers vllm,transformers]`

prefill_N_tok_s: tokens a second of one prompt of N tokens (random, so nothing is cached), its first token included.
decode_bB_tok_s: tokens a second of B streams after prompts of 256 tokens: the time for 65 tokens less that for 1.
prefill_N_int8_tok_s, int8_bB_tok_s: the same with weights in int8.
decode_b1_of_bandwidth: bytes of weights that a decode step of one stream reads, over what this machine reads from
  memory in that time, measured here.
NAME_vs_PEER: our rate over the peer's; of int8 over llama.cpp's with Q8_0, or over vllm's without. Peers run between
  two halves of our runs, so that both meet the same machine. NAME_vs_best: over the best of them without Q8_0.
engine_overhead_b8: share of a decode step of 8 streams that is not spent in the native pass.
int8_perplexity, int8_argmax_equal: of MT-bench texts, over that in bfloat16; share of tokens whose best next one is
  equal.
ready_s: from the start of the build to the first token.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from rich.console import Console

from bench.kv_quality import weights_quality
from bench.peers import PeerMissing, ask, fastest_dtype
from bench.report import Goal, Report, median_spread
from cluster.config import default_model_dir, native_dir
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.model_store import resolve_model
from engine.native.decoder import NativeDecoder
from engine.request import Request
from engine.sampling_params import SamplingParams
from worker.engine_builder import EngineParts, build_engine

GOALS = (
    Goal("decode_b1_vs_vllm", ">=", 2.5),
    Goal("decode_b8_vs_vllm", ">=", 2.2),
    Goal("decode_b32_vs_vllm", ">=", 1.7),
    Goal("prefill_512_vs_vllm", ">=", 1.0),
    Goal("prefill_2048_vs_vllm", ">=", 1.15),
    Goal("decode_b1_vs_llamacpp", ">=", 1.3),
    Goal("decode_b8_vs_best", ">=", 2.2),
    Goal("decode_b32_vs_best", ">=", 1.7),
    Goal("int8_b1_vs_llamacpp_q8", ">=", 1.0),
    Goal("prefill_2048_int8_vs_vllm", ">=", 1.15),
    Goal("decode_b1_of_bandwidth", ">=", 0.7),
    Goal("engine_overhead_b8", "<=", 0.1),
    Goal("ready_s", "<=", 5.0),
)
PROMPTS = (512, 2048)
BATCHES = (1, 8, 32)
CONTEXT = 256
OUTPUT = 64
VOCABULARY = range(100, 30_000)
_numbers = itertools.count()


@click.command(help="Prefill and decode rates of one engine, and of peers.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--runs", type=int, default=5, show_default=True, help="Of each figure, at least 2.")
@click.option("--peers", default="vllm,llamacpp,transformers", show_default=True, help="Of `bench.peers`, with commas.")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, threads: int, runs: int, peers: str, model: str) -> None:
    report = Report("engine", GOALS)
    folder = resolve_model(model, default_model_dir())
    began = time.perf_counter()
    with ExitStack() as stack:
        parts = build(stack, folder, threads, "auto")
        generate(parts.engine, 1, 32, 1)
        report.figures["ready_s"] = time.perf_counter() - began
        report.notes.append(f"kernels: {parts.kernels}; {threads} threads; batches of up to 2,048 tokens")
        int8 = build(stack, folder, threads, "int8")
        rates: dict[str, list[float]] = {}
        measure(parts, int8, rates, runs // 2)
        theirs = ask_peers([name for name in peers.split(",") if name], folder, threads, report)
        measure(parts, int8, rates, runs - runs // 2)
        report.figures["engine_overhead_b8"] = overhead(parts)
        report.figures["read_gb_s"] = read_bandwidth() / 1e9
        summarize(report, rates, theirs, weights_bytes(folder))
    report.figures |= weights_quality(folder, threads, native_dir())
    report.print(as_json)


def build(stack: ExitStack, folder: Path, threads: int, weights_dtype: str) -> EngineParts:
    parts = build_engine(
        EngineConfig(
            model_path=str(folder),
            weights_dtype=weights_dtype,
            num_threads=threads,
            enable_prefix_caching=False,
            kv_memory_bytes=1 << 30,
            native_cache=str(native_dir()),
            scheduler=SchedulerConfig(max_num_batched_tokens=2048),
        )
    )
    stack.callback(parts.kv.close)
    return parts


def measure(parts: EngineParts, int8: EngineParts, rates: dict[str, list[float]], runs: int) -> None:
    for _ in range(runs):
        for engine, prefill, decode in (
            (parts.engine, "prefill_{}_tok_s", "decode_b{}_tok_s"),
            (int8.engine, "prefill_{}_int8_tok_s", "int8_b{}_tok_s"),
        ):
            for length in PROMPTS:
                seconds = generate(engine, 1, length, 1)
                rates.setdefault(prefill.format(length), []).append(length / seconds)
            for batch in BATCHES:
                prompts_s = statistics.median(generate(engine, batch, CONTEXT, 1) for _ in range(3))
                seconds = generate(engine, batch, CONTEXT, OUTPUT + 1) - prompts_s
                rates.setdefault(decode.format(batch), []).append(batch * OUTPUT / seconds)


def overhead(parts: EngineParts) -> float:
    """Share of decode steps of 8 streams outside the native pass; all of it, with other kernels."""
    inside: list[float] = []
    forward = NativeDecoder.forward

    def timed(decoder: NativeDecoder, *arguments: Any) -> Any:
        began = time.perf_counter()
        done = forward(decoder, *arguments)
        inside.append(time.perf_counter() - began)
        return done

    with mock.patch.object(NativeDecoder, "forward", timed):
        prompts_s, prompts_inside = generate(parts.engine, 8, CONTEXT, 1), sum(inside)
        inside.clear()
        seconds = generate(parts.engine, 8, CONTEXT, OUTPUT + 1) - prompts_s
    return 1 - (sum(inside) - prompts_inside) / seconds


def generate(engine: Engine, batch: int, prompt: int, output: int) -> float:
    """Seconds until `batch` prompts have all their tokens."""
    dice = random.Random(next(_numbers))
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    prompts = [dice.choices(VOCABULARY, k=prompt) for _ in range(batch)]
    began = time.perf_counter()
    for number, token_ids in enumerate(prompts):
        engine.submit(
            Request(
                request_id=str(number),
                token_ids=token_ids,
                num_prompt_tokens=prompt,
                params=params,
                scope=b"",
                arrival=began,
            )
        )
    drawn = 0
    while engine.has_work():
        drawn += sum(update.token is not None for update in engine.step().updates)
    if drawn != batch * output:
        raise SystemExit(f"{drawn} tokens came, {batch * output} were asked for")
    return time.perf_counter() - began


def ask_peers(names: Sequence[str], folder: Path, threads: int, report: Report) -> dict[str, dict[str, float]]:
    """The rates of each; llama.cpp's with Q8_0 as those of a peer of their own."""
    theirs = {name: ask_peer(name, folder, threads, report) for name in names}
    report.notes.append(f"vllm and transformers compute in {fastest_dtype()}; llamacpp in bfloat16 and Q8_0")
    if "llamacpp" in theirs:
        q8 = {name: rate for name, rate in theirs["llamacpp"].items() if "int8" in name}
        theirs["llamacpp_q8"] = q8
        theirs["llamacpp"] = {name: rate for name, rate in theirs["llamacpp"].items() if name not in q8}
    return theirs


def ask_peer(name: str, folder: Path, threads: int, report: Report) -> dict[str, float]:
    """The peer's rates by the names of our figures; empty, with a note, if it cannot be asked."""
    Console(stderr=True).print(f"{name} ...")
    arguments = [str(folder), str(threads), *map(str, (CONTEXT, OUTPUT)), fastest_dtype()]
    try:
        answer: dict[str, float] = ask(name, f"{name}_engine.py", arguments, timeout_s=1200.0)
    except PeerMissing as missing:
        report.notes.append(f"{name} was not measured: {missing}")
        return {}
    return answer


def summarize(report: Report, rates: dict[str, list[float]], theirs: dict[str, dict[str, float]], weights: int) -> None:
    for name, values in rates.items():
        figure = name.removesuffix("_tok_s")
        ours = report.figures[name] = statistics.median(values)
        report.notes.append(f"{name}: {median_spread(values)}")
        answers = {peer: answer[name] for peer, answer in theirs.items() if name in answer}
        for peer, rate in answers.items():
            report.figures[f"{figure}_vs_{peer}"] = ours / rate
            report.notes.append(f"{name} of {peer}: {rate:.4g}")
        if answers:
            report.peers[name] = max(answers.values())
            if "int8" not in name:
                report.figures[f"{figure}_vs_best"] = ours / report.peers[name]
        in_bfloat16 = theirs.get("vllm", {}).get(name.replace("_int8", ""))
        if "int8" in name and in_bfloat16:
            report.figures[f"{figure}_vs_vllm"] = ours / in_bfloat16
    for peer, answer in theirs.items():
        if "ready_s" in answer:
            report.notes.append(f"{peer} was ready after {answer['ready_s']:.1f} s")
    needed = report.figures["decode_b1_tok_s"] * weights / 1e9
    report.figures["decode_b1_of_bandwidth"] = needed / report.figures["read_gb_s"]
    report.peers["decode_b1_of_bandwidth"] = 1.0


def weights_bytes(folder: Path) -> int:
    """Of the parameters in bfloat16, as a decode step reads them: each once, a tied embedding as the head."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def read_bandwidth() -> float:
    """Bytes a second of the best of some passes over 1 GiB, with the threads that torch has."""
    numbers = torch.ones(1 << 27, dtype=torch.int64)

    def one_pass() -> float:
        began = time.perf_counter()
        numbers.sum()
        return numbers.nbytes / (time.perf_counter() - began)

    return max(one_pass() for _ in range(7))


if __name__ == "__main__":
    main()
