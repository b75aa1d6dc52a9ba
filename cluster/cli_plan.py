"""`kvrelay plan`: the arithmetic of `engine.plan`, asked for on a command line, drawn as text or printed as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.cli_common import echo_json, json_option
from cluster.spec import DEFAULT_MODEL
from engine.config import DTYPE_BYTES, SchedulerConfig
from engine.errors import ConfigError
from engine.knobs import KNOBS, Knobs
from engine.kv_layout import KV_DTYPE_BYTES
from engine.model_shapes import SHAPES, ModelShape, find_shape
from engine.plan import Fit, Plan, Question, make_plan
from engine.sizes import format_round_size, format_size
from worker.knob_options import knob_option, size_param

DEFAULT_CONTEXT_LEN = 4096
WIDTH = 110
BAR_WIDTH = 30
ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "fp8_e4m3"}


@click.command()
@click.option("--model", default=None, metavar="NAME", help=f"A model's folder, or one of: {', '.join(SHAPES)}.")
@click.option("--layers", type=int, default=None, help="Of a model that is given by its shape.")
@click.option("--kv-heads", type=int, default=None, help="Of a model that is given by its shape.")
@click.option("--head-dim", type=int, default=None, help="Of a model that is given by its shape.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of weights and activations; fp16 is float16.")
@click.option("--context", type=int, default=None, metavar="TOKENS", help="Of one request, prompt and output together.")
@click.option("--shared-prefix", type=int, default=0, metavar="TOKENS", help="That all requests begin with.")
@click.option("--weights", type=size_param, default=0, metavar="BYTES", help="Of the whole model, to be subtracted.")
@json_option
def plan(as_json: bool, dtype: str, context: int | None, shared_prefix: int, weights: int, **flags: Any) -> None:
    """Show what fits into memory, before anything is started.

    Sizes have units: GB is decimal, GiB is binary. Without options: what one worker of `kvrelay up` holds.
    """
    shape = _shape(flags["model"], {name: flags[name] for name in ("layers", "kv_heads", "head_dim")})
    dtype, kv_cache_dtype = (ALIASES.get(name, name) for name in (dtype, flags["kv_cache_dtype"]))
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype must be one of {', '.join(sorted(DTYPE_BYTES))}, got {dtype!r}")
    knobs = Knobs(**{name: flags[name] for name in KNOBS} | {"kv_cache_dtype": kv_cache_dtype})
    limit = knobs.max_model_len or shape.max_model_len or DEFAULT_CONTEXT_LEN
    made = make_plan(
        Question(
            shape=shape,
            knobs=knobs,
            dtype=dtype,
            context_len=min(DEFAULT_CONTEXT_LEN, limit) if context is None else context,
            shared_prefix_len=shared_prefix,
            weights_bytes=weights,
        )
    )
    if as_json:
        echo_json(asdict(made) | {"kv_dtype": made.question.kv_dtype, "notes": list(_notes(made))})
    else:
        console = Console(highlight=False)
        (console if console.is_terminal else Console(highlight=False, width=WIDTH)).print(plan_view(made))


plan.params += [
    knob_option(
        "kv_memory_bytes",
        flags=["--memory", "--kv-memory-bytes"],
        help_text="Memory of one device for KV; with --weights or --gpu-memory-utilization, the device's whole memory.",
    ),
    *(knob_option(name) for name in KNOBS if name != "kv_memory_bytes"),
]


def _shape(model: str | None, dimensions: dict[str, int | None]) -> ModelShape:
    given = [name for name, value in dimensions.items() if value is not None]
    if not given:
        return find_shape(model or DEFAULT_MODEL)
    if model is not None:
        raise click.UsageError(f"--model and --{given[0].replace('_', '-')} exclude each other")
    layers, kv_heads, head_dim = dimensions.values()
    if layers is None or kv_heads is None or head_dim is None:
        raise click.UsageError("a model that is given by its shape needs --layers, --kv-heads and --head-dim")
    return ModelShape(name="this model", num_layers=layers, num_kv_heads=kv_heads, head_dim=head_dim)


def plan_view(made: Plan) -> RenderableType:
    return Group(
        _headline(made.question),
        Text(),
        _summary(made),
        Text(),
        Text("With one knob changed", style="bold"),
        _alternatives(made),
        Text(),
        Text("Last block of each request, by block size: half of it stays empty", style="bold"),
        _waste(made),
        *(Text(f"note: {note}", style="yellow") for note in _notes(made)),
    )


def _headline(question: Question) -> Text:
    shape, devices = question.shape, question.knobs.tensor_parallel_size
    memory = format_round_size(question.kv_memory_bytes)
    where = f"{memory} for it" if devices == 1 else f"{memory} for it on each of {devices} devices"
    return Text(
        f"{shape.name}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}; "
        f"KV in {question.kv_dtype}, {where}",
        style="bold",
    )


def _summary(made: Plan) -> Table:
    question, chosen = made.question, made.chosen
    layout, knobs = question.layout, question.knobs
    product = f"2 x {layout.num_layers} layers x {layout.num_kv_heads} KV heads x {layout.head_dim}"
    product += f" x {KV_DTYPE_BYTES[layout.dtype]} B" + (", and scales" if layout.quantized else "")
    request_bytes = format_size(chosen.blocks_per_request * chosen.block_bytes)
    share = f"; {chosen.shared_blocks:,} of the blocks are shared by all" if chosen.shared_blocks else ""
    table = Table.grid(padding=(0, 2))
    table.add_row("one token", f"{chosen.token_bytes:,} B = {product}")
    table.add_row("one block", f"{format_size(chosen.block_bytes)}, {knobs.block_size} tokens")
    pool = f"{chosen.num_blocks:,} blocks = {chosen.num_tokens:,} tokens in {format_size(chosen.pool_bytes)}"
    table.add_row("the pool", pool)
    request = f"{chosen.blocks_per_request:,} blocks = {request_bytes} at {question.context_len:,} tokens{share}"
    table.add_row("one request", request)
    table.add_row("at once", Text(f"{chosen.num_requests:,} such requests", style="bold"))
    if made.contiguous_requests is not None:
        limit = f"{made.contiguous_requests:,}, each of which reserved max_model_len, {question.max_model_len:,} tokens"
        table.add_row("without blocks", limit)
    if made.swap_blocks:
        swapped = f"{made.swap_blocks:,} blocks more: {made.swap_requests:,} such requests that wait"
        table.add_row("in swap_space", swapped)
    return table


def _alternatives(made: Plan) -> Table:
    table = _table("knob", "a token", "tokens", "requests")
    most = max(each.num_requests for each in (made.chosen, *made.alternatives))
    for each in (made.chosen, *made.alternatives):
        table.add_row(
            _label(each, made.question),
            f"{each.token_bytes:,} B",
            f"{each.num_tokens:,}",
            f"{each.num_requests:,}",
            _bar(each.num_requests, most),
            style="bold" if each is made.chosen else "",
        )
    return table


def _label(each: Fit, question: Question) -> str:
    name, _, value = each.label.partition(" ")
    if name == "sliding_window" and value == str(question.shape.sliding_window):
        return f"{each.label}, the model's"
    return each.label


def _waste(made: Plan) -> Table:
    table = _table("block_size", "a block", "empty tokens", "empty", "requests")
    most = max(each.percent for each in made.waste)
    for each in made.waste:
        table.add_row(
            str(each.block_size),
            format_size(each.block_bytes),
            f"{each.tokens:.1f}",
            f"{each.percent:.2f} %",
            f"{each.num_requests:,}",
            _bar(each.percent, most),
            style="bold" if each.block_size == made.question.knobs.block_size else "",
        )
    return table


def _notes(made: Plan) -> Iterator[str]:
    chosen, question = made.chosen, made.question
    if chosen.refused:
        yield f"workers do not start with this: {chosen.refused}"
    if not chosen.num_requests:
        yield f"a request of {question.context_len:,} tokens does not fit, and is refused"
    if any(each.label.startswith("tensor_parallel_size") for each in made.alternatives):
        yield "bytes are those of one device; with tensor_parallel_size N there are N of them, with as much memory each"
        yield "on CPUs these are processes that share one pool of kv_memory_bytes"
    most = SchedulerConfig().max_num_seqs
    if chosen.num_requests > most:
        yield f"a worker runs at most max_num_seqs requests at once; its default is {most}"


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", width=BAR_WIDTH)
    return table


def _bar(value: float, most: float) -> RenderableType:
    return Bar(size=most or 1, begin=0, end=value, width=BAR_WIDTH)
