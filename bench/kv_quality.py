"""What does each type of KV cost in quality, and what does it save in memory? Everything against bfloat16 KV.

`python -m bench.kv_quality [--json] [--limit N]`

The texts are MT-bench conversations, in which recorded answers stand for the assistant's. Short: the two turns of one
conversation. Long: turns of many conversations in a row, 2,000 tokens or more, of which those count that have 1,000
before them. Weights and activations are bfloat16, and prompts are computed in chunks of 512 tokens, as workers do.

perplexity: of the text, teacher-forced.
argmax_equal: share of its tokens where the most likely next token is the one with bfloat16 KV.
tokens_equal: tokens of a greedy answer to the last turn before the first that differs, mean; 48 are drawn at most.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import eq
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import track

from bench.parity import Golden, encode, read_golden, second_turns
from bench.report import Report
from cluster.config import default_model_dir
from engine.batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.kv_layout import KV_DTYPE_BYTES, KvLayout
from engine.model.decoder import Model
from engine.model.registry import load_model
from engine.model_store import resolve_model
from engine.native.decoder import load_decoder
from engine.tokenizer import ChatMessage, Tokenizer

BASE = "bfloat16"
BLOCK_SIZE = 16
CHUNK_TOKENS = 512
OUTPUT_TOKENS = 48
LONG_TOKENS = 2_000
LONG_CONTEXT = 1_000
CONVERSATIONS_PER_LONG_TEXT = 8
"""One long text is measured for so many conversations of `--limit`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One type of KV over all texts of one length."""

    perplexity: float
    best: list[int]
    """Most likely next token at each counted place."""
    answers: list[list[int]]
    """Greedy; an end of sequence is the last token."""
    seconds: float


def short_texts(tokenizer: Tokenizer, golden: Sequence[Golden]) -> list[list[int]]:
    return [encode(tokenizer, prompt) for prompt in second_turns(golden, tokenizer)]


def long_texts(tokenizer: Tokenizer, golden: Sequence[Golden], count: int) -> list[list[int]]:
    """Each begins with another conversation, and ends with a question."""
    pairs = [
        (record.prompt[-1]["content"], tokenizer.decode(record.tokens))
        for record in golden
        if not isinstance(record.prompt, str)
    ]
    texts = []
    for i in range(count):
        messages: list[ChatMessage] = []
        for question, answer in _rotated(pairs, i * len(pairs) // count):
            messages.append(ChatMessage("user", question))
            token_ids = tokenizer.encode_chat(messages)
            if len(token_ids) >= LONG_TOKENS:
                break
            messages.append(ChatMessage("assistant", answer))
        texts.append(token_ids)
    return texts


def _rotated(pairs: Sequence[tuple[str, str]], start: int) -> Iterator[tuple[str, str]]:
    while True:
        yield pairs[start % len(pairs)]
        start += 1


class KvRun:
    """One model over a pool of one type, which has room for all texts and their answers."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], dtype: str) -> None:
        self._model = model
        self._texts = texts
        sizes = [-(-(len(text) + OUTPUT_TOKENS) // BLOCK_SIZE) for text in texts]
        self._tables = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
        self._kv = KvCache(layout_of(model, dtype), sum(sizes))

    def close(self) -> None:
        self._kv.close()

    def read_text(self, text: int) -> Iterator[torch.Tensor]:
        """Compute one text, chunk by chunk: yields the logits after each token, [n, vocab]."""
        token_ids = self._texts[text]
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[start : start + CHUNK_TOKENS]
            yield self._forward([chunk], [start], [text], list(range(len(chunk))))

    def answer(self, first_tokens: Sequence[int]) -> list[list[int]]:
        """Greedy answers to all texts, each of which was read and has its answer's first token, together."""
        answers = [[token] for token in first_tokens]
        stop = set(self._model.config.eos_token_ids)
        for _ in range(OUTPUT_TOKENS - 1):
            going = [i for i, answer in enumerate(answers) if answer[-1] not in stop]
            if not going:
                break
            starts = [len(self._texts[i]) + len(answers[i]) - 1 for i in going]
            logits = self._forward([answers[i][-1:] for i in going], starts, going, list(range(len(going))))
            for i, token in zip(going, logits.argmax(-1).tolist(), strict=True):
                answers[i].append(token)
        return answers

    def _forward(
        self, chunks: Sequence[Sequence[int]], starts: Sequence[int], texts: Sequence[int], sample_rows: list[int]
    ) -> torch.Tensor:
        positions = [range(start, start + len(chunk)) for start, chunk in zip(starts, chunks, strict=True)]
        query_starts = [0]
        for chunk in chunks:
            query_starts.append(query_starts[-1] + len(chunk))
        batch = ForwardBatch(
            token_ids=torch.tensor([token_id for chunk in chunks for token_id in chunk]),
            positions=torch.tensor([position for part in positions for position in part]),
            query_starts=query_starts,
            context_lens=[part.stop for part in positions],
            block_tables=[self._tables[text] for text in texts],
            sample_rows=sample_rows,
        )
        return self._model.forward(batch, self._kv)


def layout_of(model: Model, dtype: str) -> KvLayout:
    config = model.config
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )


def measure(model: Model, texts: Sequence[Sequence[int]], dtype: str, count_from: int, title: str) -> Outcome:
    """Counts the tokens of each text that have `count_from` or more before them."""
    started = time.monotonic()
    run = KvRun(model, texts, dtype)
    logprobs: list[torch.Tensor] = []
    best: list[int] = []
    first_tokens = []
    try:
        for i in track(range(len(texts)), title, console=Console(stderr=True), transient=True):
            logits = torch.cat(list(run.read_text(i)))  # [tokens, vocab]
            first_tokens.append(int(logits[-1].argmax()))
            logits = logits[count_from - 1 : -1]
            wanted = torch.tensor(texts[i][count_from:])
            logprobs.append(logits.log_softmax(-1).gather(1, wanted[:, None]).flatten())
            best += logits.argmax(-1).tolist()
        answers = run.answer(first_tokens)
    finally:
        run.close()
    perplexity = math.exp(-float(torch.cat(logprobs).double().mean()))
    return Outcome(perplexity, best, answers, time.monotonic() - started)


def weights_quality(folder: Path, threads: int, native_cache: Path, limit: int = 4) -> dict[str, float]:
    """Perplexity of short texts with weights in int8 over that in bfloat16, and how often the best token is equal, both
    by the native kernels. Raises `NativeUnavailable` where there are none."""
    decoder = load_decoder(native_cache)
    texts = short_texts(Tokenizer.load(folder), read_golden())[:limit]
    base, int8 = (
        measure(load_model(folder, BASE, decoder, threads, weights_dtype=weights), texts, BASE, 1, weights)
        for weights in ("auto", "int8")
    )
    return {
        "int8_perplexity": int8.perplexity / base.perplexity,
        "int8_argmax_equal": statistics.mean(map(eq, int8.best, base.best)),
    }


def tokens_equal(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def compare(report: Report, length: str, outcomes: Mapping[str, Outcome]) -> None:
    base = outcomes[BASE]
    answer_length = statistics.mean(len(answer) for answer in base.answers)

    def note(name: str, value: Callable[[Outcome], float], peer: float) -> None:
        for dtype, outcome in outcomes.items():
            report.figures[f"{name}_{length}_{dtype}"] = value(outcome)
            report.peers[f"{name}_{length}_{dtype}"] = peer

    note("perplexity", lambda outcome: outcome.perplexity, base.perplexity)
    note("argmax_equal", lambda outcome: statistics.mean(map(eq, outcome.best, base.best)), 1.0)
    note(
        "tokens_equal", lambda outcome: statistics.mean(map(tokens_equal, outcome.answers, base.answers)), answer_length
    )
    seconds = ", ".join(f"{dtype} {outcome.seconds:.0f}" for dtype, outcome in outcomes.items())
    report.notes.append(f"{length}: {len(base.answers)} texts, {len(base.best)} tokens counted; seconds: {seconds}")


@click.command(help="Quality and size of each type of KV, against bfloat16.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.option("--limit", type=click.IntRange(1, 40), default=8, show_default=True, help="Conversations.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--model", default="smollm2-135m", show_default=True)
def main(as_json: bool, limit: int, threads: int, model: str) -> None:
    torch.set_num_threads(threads)
    report = Report("kv_quality")
    folder: Path = resolve_model(model, default_model_dir())
    tokenizer, golden = Tokenizer.load(folder), read_golden()
    llama = load_model(folder, BASE)
    for dtype in KV_DTYPE_BYTES:
        layout = layout_of(llama, dtype)
        report.figures[f"bytes_per_token_{dtype}"] = layout.block_bytes / BLOCK_SIZE
        report.peers[f"bytes_per_token_{dtype}"] = layout_of(llama, BASE).block_bytes / BLOCK_SIZE
    num_long = -(-limit // CONVERSATIONS_PER_LONG_TEXT)
    for length, texts, count_from in (
        ("short", short_texts(tokenizer, golden)[:limit], 1),
        ("long", long_texts(tokenizer, golden, num_long), LONG_CONTEXT),
    ):
        outcomes = {dtype: measure(llama, texts, dtype, count_from, f"{length}, {dtype}") for dtype in KV_DTYPE_BYTES}
        compare(report, length, outcomes)
    report.notes.append("peer of each figure: bfloat16 KV; of tokens_equal: the length of its answers")
    report.print(as_json)


if __name__ == "__main__":
    main()
