"""How fast does one engine compute, beside other engines in the same run?

`python -m bench.engine [--json] [--threads N] [--runs N] [--peers vllm,transformers]`

prefill_N_tok_s: tokens a second of one prompt of N tokens (random, so nothing is cached), its first token included.
decode_bB_tok_s: tokens a second of B streams after prompts of 256 tokens: the time for 65 tokens less that for 1.
decode_b1_of_bandwidth: bytes of weights that a decode step of one stream reads, over what this machine reads from
  memory in that time, measured here.
NAME_vs_PEER: our rate over the peer's. Peers run between two halves of our runs, so that both meet the same machine.
ready_s: from the start of the build to the first token.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from pathlib import Path

import click
import torch
from rich.console import Console

from bench.peers import PeerMissing, ask
from bench.report import Goal, Report, median_spread
from cluster.config import default_model_dir, native_dir
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.model_store import resolve_model
from engine.request import Request
from engine.sampling_params import SamplingParams
from worker.engine_builder import EngineParts, build_engine

GOALS = (
    Goal("decode_b1_vs_vllm", ">=", 2.5),
    Goal("decode_b8_vs_vllm", ">=", 2.2),
    Goal("decode_b32_vs_vllm", ">=", 1.7),
    Goal("prefill_512_vs_vllm", ">=", 1.0),
    Goal("prefill_2048_vs_vllm", ">=", 1.15),
    Goal("decode_b1_of_bandwidth", ">=", 0.7),
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
@click.option("--peers", default="vllm,transformers", show_default=True, help="Of `bench.peers`, with commas.")
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, threads: int, runs: int, peers: str, model: str) -> None:
    report = Report("engine", GOALS)
    folder = resolve_model(model, default_model_dir())
    began = time.perf_counter()
    parts = build_engine(
        EngineConfig(
            model_path=str(folder),
            num_threads=threads,
            enable_prefix_caching=False,
            kv_memory_bytes=1 << 30,
            native_cache=str(native_dir()),
            scheduler=SchedulerConfig(max_num_batched_tokens=2048),
        )
    )
    generate(parts.engine, 1, 32, 1)
    report.figures["ready_s"] = time.perf_counter() - began
    report.notes.append(f"kernels: {parts.kernels}; {threads} threads; batches of up to 2,048 tokens")
    try:
        rates: dict[str, list[float]] = {}
        measure(parts, rates, runs // 2)
        theirs = {name: ask_peer(name, folder, threads, report) for name in filter(None, peers.split(","))}
        measure(parts, rates, runs - runs // 2)
        report.figures["read_gb_s"] = read_bandwidth() / 1e9
        summarize(report, rates, theirs, weights_bytes(folder))
    finally:
        parts.kv.close()
    report.print(as_json)


def measure(parts: EngineParts, rates: dict[str, list[float]], runs: int) -> None:
    for _ in range(runs):
        for length in PROMPTS:
            seconds = generate(parts.engine, 1, length, 1)
            rates.setdefault(f"prefill_{length}_tok_s", []).append(length / seconds)
        for batch in BATCHES:
            prompts_s = statistics.median(generate(parts.engine, batch, CONTEXT, 1) for _ in range(3))
            seconds = generate(parts.engine, batch, CONTEXT, OUTPUT + 1) - prompts_s
            rates.setdefault(f"decode_b{batch}_tok_s", []).append(batch * OUTPUT / seconds)


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


def ask_peer(name: str, folder: Path, threads: int, report: Report) -> dict[str, float]:
    """The peer's rates by the names of our figures; empty, with a note, if it cannot be asked."""
    Console(stderr=True).print(f"{name} ...")
    arguments = [str(folder), str(threads), *map(str, (CONTEXT, OUTPUT))]
    try:
        answer: dict[str, float] = ask(name, f"{name}_engine.py", arguments, timeout_s=1200.0)
    except PeerMissing as missing:
        report.notes.append(f"{name} was not measured: {missing}")
        return {}
    return answer


def summarize(report: Report, rates: dict[str, list[float]], theirs: dict[str, dict[str, float]], weights: int) -> None:
    for name, values in rates.items():
        report.figures[name] = statistics.median(values)
        report.notes.append(f"{name}: {median_spread(values)}")
        for peer, answer in theirs.items():
            if name in answer:
                report.figures[f"{name.removesuffix('_tok_s')}_vs_{peer}"] = report.figures[name] / answer[name]
                report.peers[name] = answer[name]
                report.notes.append(f"{name} of {peer}: {answer[name]:.4g}")
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
