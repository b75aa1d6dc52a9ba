"""A finished answer in a few lines of plain text: where it ran, what moved, where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.types import Generation, Route, Span, Waterfall


def summarize(generation: Generation) -> list[str]:
    """Lines of `label  text`, the labels in one column."""
    usage = generation.usage
    tokens = f"{usage.prompt_tokens} in ({usage.cached_tokens} cached), {usage.completion_tokens} out"
    return [
        *summarize_route(generation.route),
        *summarize_waterfall(generation.waterfall),
        _line("tokens", f"{tokens}, ended by {generation.finish_reason}"),
        _line("request", generation.request_id),
    ]


def summarize_route(route: Route) -> list[str]:
    where = f"prefill on {route.prefill_worker}, decode on {route.decode_worker}"
    if not route.prefill_worker:
        where = f"prefill and decode on {route.decode_worker}"
    if route.attempts > 1:
        where += f", attempt {route.attempts}"
    blocks = (
        f"{route.blocks_computed} computed, {route.blocks_sent} sent, "
        f"{route.blocks_adopted} adopted, {route.blocks_cached} cached"
    )
    if route.blocks_sent:
        blocks += f"; {format_bytes(route.bytes_sent)} over {route.transport or 'an unnamed transport'}"
    if route.recomputed_tokens:
        blocks += f"; {route.recomputed_tokens} prompt tokens recomputed by the decode worker"
    return [_line("route", where), _line("blocks", blocks)]


def summarize_waterfall(waterfall: Waterfall) -> list[str]:
    lines = [_line("TTFT", _with_parts(waterfall.ttft_us, waterfall.parts))]
    if waterfall.second_token_us:
        lines.append(_line("2nd token", _with_parts(waterfall.second_token_us, waterfall.after_first)))
    if waterfall.decode_tokens_per_s:
        lines.append(_line("decode", f"{waterfall.decode_tokens_per_s:.1f} tokens/s"))
    return lines


def format_bytes(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"


def format_ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.1f}"


def _with_parts(total_us: int, parts: Sequence[Span]) -> str:
    total = f"{format_ms(total_us)} ms"
    if not parts:
        return total
    return f"{total} = " + " + ".join(f"{_words(part.name)} {format_ms(part.duration_us)}" for part in parts)


def _line(label: str, text: str) -> str:
    return f"{label:<10}{text}"


def _words(name: str) -> str:
    return name.replace("_", " ")
