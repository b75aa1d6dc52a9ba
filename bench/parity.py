"""Does the split system say what one worker says, and what an independent engine says?

`python -m bench.parity [--json] [--limit N] [--bfloat16]`

(a) Prompt token counts against the golden records (made with llama.cpp from the same GGUF).
(b) Teacher-forced: at each golden step, our arg-max and the log-probability of the golden best token. llama.cpp
    quantizes activations, so an arg-max counts where the golden margin is 0.5 or more, a log-probability within 0.35.
(c) The tokens of a split system (one prefill, one decode worker) against those of a single worker: greedy, and
    sampled with a seed. Every prompt of the golden records, and the second turns of MT-bench.
(d) Prompt tokens that the decode worker of the split system had to compute again.

In float32; with --bfloat16 all of it in bfloat16 too, by the kernels that serve there (figures that end in `_bf16`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track

from bench.local_system import LocalSystem
from bench.report import REPOSITORY, Goal, Report
from cluster.config import default_model_dir, native_dir
from engine.batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.registry import load_model
from engine.model_store import resolve_model
from engine.native.decoder import load_decoder
from engine.tokenizer import ChatMessage, Tokenizer
from kv_transfer.identity import DEFAULT_TRANSPORTS
from kvrelay import Client, Generation

DATA = REPOSITORY / "tests" / "data"
MARGIN = 0.5
LOGPROB_TOLERANCE = 0.35
OUTPUT_TOKENS = 48
SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.01,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
}
IN_FLIGHT = 16
"""Requests at once: results must not depend on it, and float32 products take 8 rows for the price of one."""
GOALS = (
    Goal("prompt_count_equal", "==", 1.0),
    Goal("argmax_equal", "==", 1.0),
    Goal("logprob_within", "==", 1.0),
    Goal("split_equal", "==", 1.0),
    Goal("split_equal_sampled", "==", 1.0),
    Goal("recomputed_tokens", "==", 0.0),
    Goal("split_equal_bf16", "==", 1.0),
    Goal("split_equal_sampled_bf16", "==", 1.0),
)

Prompt = str | list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Golden:
    """One golden record: the prompt, and per step the best tokens with their log-probabilities."""

    prompt: Prompt
    prompt_tokens: int
    tokens: list[int]
    steps: list[list[tuple[int, float]]]
    margins: list[float]


def read_golden() -> list[Golden]:
    records = []
    for name in ("golden_chat", "golden_completion"):
        with gzip.open(DATA / "smollm2_golden" / f"{name}.jsonl.gz", "rt") as lines:
            records += [_golden(json.loads(line)) for line in lines]
    return records


def _golden(row: dict[str, Any]) -> Golden:
    return Golden(
        prompt=row["messages"] if "messages" in row else row["prompt"],
        prompt_tokens=row["prompt_tokens"],
        tokens=row["tokens"],
        steps=[[(int(token), float(logprob)) for token, logprob in step] for step in row["steps"]],
        margins=row["margin"],
    )


def second_turns(golden: Iterable[Golden], tokenizer: Tokenizer) -> list[Prompt]:
    """MT-bench conversations at their second turn; the golden answer stands for the first."""
    answers = {_first_turn(record.prompt): tokenizer.decode(record.tokens) for record in golden}
    prompts: list[Prompt] = []
    with (DATA / "mt_bench" / "question.jsonl").open() as lines:
        for line in lines:
            first, second = json.loads(line)["turns"][:2]
            turns = [("user", first), ("assistant", answers.get(first, "I see.")), ("user", second)]
            prompts.append([{"role": role, "content": content} for role, content in turns])
    return prompts


def _first_turn(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat([ChatMessage(message["role"], message["content"]) for message in prompt])


@dataclass(frozen=True, slots=True)
class TeacherForced:
    argmax_equal: int
    argmax_judged: int
    logprob_within: int
    steps: int
    worst_logprob_difference: float


def teacher_forced(folder: Path, tokenizer: Tokenizer, records: Sequence[Golden], dtype: str) -> TeacherForced:
    """Compares our logits with the golden ones at every golden step, each record in one forward pass."""
    torch.set_num_threads(1)
    decoder = load_decoder(native_dir()) if dtype == "bfloat16" else None
    model = load_model(folder, dtype, decoder)
    config = model.config
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=dtype,
    )
    longest = max(record.prompt_tokens + len(record.tokens) for record in records)
    kv = KvCache(layout, -(-longest // layout.block_size))
    equal = judged = within = steps = 0
    worst = 0.0
    try:
        for record in track(records, f"teacher-forced, {dtype}", console=Console(stderr=True), transient=True):
            prompt = encode(tokenizer, record.prompt)
            logprobs = _step_logprobs(model.forward(_whole(prompt, record.tokens), kv))
            for row, best, margin in zip(logprobs, record.steps, record.margins, strict=True):
                token, golden_logprob = best[0]
                difference = abs(float(row[token]) - golden_logprob)
                worst = max(worst, difference)
                steps += 1
                within += difference <= LOGPROB_TOLERANCE
                if margin >= MARGIN:
                    judged += 1
                    equal += int(row.argmax()) == token
    finally:
        kv.close()
    return TeacherForced(equal, judged, within, steps, worst)


def _whole(prompt: list[int], output: list[int]) -> ForwardBatch:
    """One sequence, all at once; logits wherever an output token is to be predicted."""
    tokens = prompt + output[:-1]
    return ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        query_starts=[0, len(tokens)],
        context_lens=[len(tokens)],
        block_tables=[list(range(-(-len(tokens) // 16)))],
        sample_rows=list(range(len(prompt) - 1, len(tokens))),
    )


def _step_logprobs(logits: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def generate_all(address: str, prompts: Sequence[Prompt], sampled: bool, title: str) -> list[Generation]:
    """Every prompt through the router, `IN_FLIGHT` at a time, in order."""

    def one(item: tuple[int, Prompt]) -> Generation:
        number, prompt = item
        sampling = {**SAMPLED, "seed": number} if sampled else {"temperature": 0.0}
        source = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        return client.generate(**source, **sampling, max_tokens=OUTPUT_TOKENS, timeout_s=600)  # type: ignore[arg-type]

    with Client(address) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        results = pool.map(one, enumerate(prompts))
        return list(track(results, title, total=len(prompts), console=Console(stderr=True), transient=True))


def _same_answer(ours: Generation, theirs: Generation) -> bool:
    """Tokens, reason and counts; `cached_tokens` depends on what ran before, so it is left out."""
    return (
        ours.token_ids == theirs.token_ids
        and ours.finish_reason == theirs.finish_reason
        and ours.usage.prompt_tokens == theirs.usage.prompt_tokens
        and ours.usage.completion_tokens == theirs.usage.completion_tokens
    )


@click.command(help="Split system against single worker, and both against golden records.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--limit", type=int, default=None, help="Only the first N prompts of each kind.")
@click.option("--bfloat16", is_flag=True, help="In bfloat16 too.")
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--kv-transports", default=",".join(DEFAULT_TRANSPORTS), show_default=True, help="Of the split system.")
def main(as_json: bool, limit: int | None, bfloat16: bool, model: str, kv_transports: str) -> None:
    folder = resolve_model(model, default_model_dir())
    tokenizer = Tokenizer.load(folder)
    golden = read_golden()[:limit]
    report = Report("parity", GOALS)

    counts = [len(encode(tokenizer, record.prompt)) == record.prompt_tokens for record in golden]
    report.figures["prompt_count_equal"] = sum(counts) / len(counts)

    prompts = [record.prompt for record in golden] + second_turns(golden, tokenizer)[:limit]
    for dtype, suffix in (("float32", ""), ("bfloat16", "_bf16"))[: 2 if bfloat16 else 1]:
        forced = teacher_forced(folder, tokenizer, golden, dtype)
        report.figures[f"argmax_equal{suffix}"] = forced.argmax_equal / forced.argmax_judged
        report.figures[f"logprob_within{suffix}"] = forced.logprob_within / forced.steps
        report.notes.append(
            f"{dtype}: {forced.steps} steps, {forced.argmax_judged} with a margin of {MARGIN} or more; "
            f"largest difference of a best token's log-probability {forced.worst_logprob_difference:.3f}"
        )
        compare_systems(report, folder, prompts, (dtype, suffix), kv_transports)
    report.print(as_json)


def compare_systems(
    report: Report, folder: Path, prompts: Sequence[Prompt], kind: tuple[str, str], kv_transports: str
) -> None:
    """Parts (c) and (d), in a type; `kind`: its name, and what the figures are called by."""
    dtype, suffix = kind
    flags = ["--dtype", dtype, "--kv-memory-bytes", str(512 << 20), "--native-cache", str(native_dir())]
    flags += ["--kv-transports", kv_transports]
    single: dict[bool, list[Generation]] = {}
    split: dict[bool, list[Generation]] = {}
    for title, prefill, results in (("single worker", 0, single), ("split", 1, split)):
        with LocalSystem(folder, prefill=prefill, decode=1, worker_flags=flags) as system:
            for sampled in (False, True):
                name = f"{dtype}, {'sampled' if sampled else 'greedy'}"
                results[sampled] = generate_all(system.router_address, prompts, sampled, f"{title}, {name}")

    for sampled, name in ((False, "split_equal"), (True, "split_equal_sampled")):
        pairs = list(zip(split[sampled], single[sampled], strict=True))
        equal = sum(_same_answer(ours, theirs) for ours, theirs in pairs)
        report.figures[name + suffix] = equal / len(pairs)
    routes = [generation.route for results in split.values() for generation in results]
    report.figures["recomputed_tokens" + suffix] = sum(route.recomputed_tokens for route in routes)
    report.figures["prompts" + suffix] = len(prompts)
    remote = "split_requests_prefilled_remotely" + suffix
    report.figures[remote] = sum(bool(route.prefill_worker) for route in routes)
    report.figures["blocks_adopted" + suffix] = sum(route.blocks_adopted for route in routes)
    report.peers[remote] = len(routes)


if __name__ == "__main__":
    main()
