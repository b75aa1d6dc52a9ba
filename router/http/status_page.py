"""The status page: what is on it, as data, and as HTML. Pure, apart from reading its templates once.

Nothing that a client sent is on it but request ids: no prompt, no token, no message that may quote one. A page lists a
bounded number of everything, and says how many are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvrelay.summary import format_bytes
from kvrelay.types import ClusterStatus, Explanation, Span, Waterfall, WorkerStatus
from router.links import LinkUse

STATIC = Path(__file__).parent / "static"
MAX_WORKERS, MAX_LINKS, MAX_LIVE, MAX_RECENT = 128, 64, 32, 16
BAR = 1000
"""Width of a bar in units of its own; a browser stretches it."""
BLOCK_STATES = ("owned", "leased", "quarantined", "cached", "free")
_KINDS = {
    "compute": ("prefill_compute", "decode_prefill"),
    "decode": ("first_decode_step", "decode"),
    "transfer": ("transfer",),
    "wait": ("reserve_wait", "prefill_queue", "first_choice"),
    "failed": ("failed_attempt", "prefill_failed"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    request_id: str
    age_s: float
    remaining_s: float
    """Of its deadline."""
    prefill_worker: str
    """Of the placement so far; both empty until there is one."""
    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusDocument:
    """All that the page shows, already bounded. `omitted` says of each list how many are not in it."""

    model: str
    generation_tokens: int
    status: ClusterStatus
    links: Sequence[LinkUse]
    live: Sequence[LiveRow]
    recent: Sequence[Explanation]
    """Newest first."""
    request: Explanation | None
    """The one whose waterfall is shown."""
    errors: Mapping[str, int]
    """Calls that ended badly, by class."""
    omitted: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a bar, in units of `BAR`."""

    kind: str
    x: int
    width: int
    label: str
    value: str
    note: str = ""


class StatusPage:
    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(STATIC),
            autoescape=True,
            undefined=StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {"bytes": format_bytes, "count": _count, "ms": _ms, "age": _age, "words": _words}
        self._environment.globals |= {
            "block_pieces": block_pieces,
            "spans": spans,
            "mini": mini,
            "svg": svg,
            "pools": pools,
            "median_ttft_us": median_ttft_us,
            "BLOCK_STATES": BLOCK_STATES,
            "BAR": BAR,
        }

    def whole(self, document: StatusDocument) -> str:
        return self._environment.get_template("status.html").render(doc=document)

    def main(self, document: StatusDocument) -> str:
        """What a refresh replaces."""
        return self._environment.get_template("main.html").render(doc=document)


def pools(workers: Iterable[WorkerStatus]) -> dict[str, list[WorkerStatus]]:
    """Workers by role; those that never said theirs last."""
    found: dict[str, list[WorkerStatus]] = {"prefill": [], "decode": [], "": []}
    for worker in workers:
        found.setdefault(worker.role, []).append(worker)
    return {role: sorted(members, key=lambda each: each.worker_id) for role, members in found.items() if members}


def block_pieces(worker: WorkerStatus) -> list[Piece]:
    """Blocks by state; what a worker has not told of is no piece."""
    counts = [(state, getattr(worker, f"blocks_{state}")) for state in BLOCK_STATES]
    return _pieces([(state, state, count, str(count)) for state, count in counts], worker.blocks_total)


def spans(waterfall: Waterfall) -> list[Piece]:
    """From receipt to the second token, one below the other."""
    parts = [*waterfall.parts, *waterfall.after_first]
    total_us = waterfall.ttft_us + waterfall.second_token_us
    told = [(_KIND_OF.get(part.name, "other"), part.name, part.duration_us, _ms(part.duration_us)) for part in parts]
    return _pieces(told, total_us, keep_empty=True)


def mini(waterfall: Waterfall) -> list[Piece]:
    """The time to the first token by kind, in order."""
    merged: list[Span] = []
    for part in waterfall.parts:
        kind = _KIND_OF.get(part.name, "other")
        if merged and merged[-1].name == kind:
            merged[-1] = Span(kind, merged[-1].duration_us + part.duration_us)
        else:
            merged.append(Span(kind, part.duration_us))
    return _pieces(
        [(part.name, part.name, part.duration_us, _ms(part.duration_us)) for part in merged], waterfall.ttft_us
    )


def svg(pieces: Sequence[Piece], label: str) -> Markup:
    """One bar. Presentation attributes only: the page's policy forbids styles in elements."""
    parts = [
        Markup('<rect class="k-{}" x="{}" width="{}" height="10"><title>{} {}</title></rect>').format(
            piece.kind, piece.x, piece.width, _words(piece.label), piece.value
        )
        for piece in pieces
    ]
    head = Markup('<svg class="bar" viewBox="0 0 {} 10" preserveAspectRatio="none" role="img" aria-label="{}">')
    return head.format(BAR, label) + Markup("").join(parts) + Markup("</svg>")


def median_ttft_us(recent: Iterable[Explanation]) -> int | None:
    """Of those that had a first token."""
    times = sorted(each.waterfall.ttft_us for each in recent if each.waterfall.ttft_us)
    return times[len(times) // 2] if times else None


def _pieces(parts: Sequence[tuple[str, str, int, str]], total: int, keep_empty: bool = False) -> list[Piece]:
    """Of (kind, label, amount, value). Edges are rounded, not widths: pieces meet and never leave the bar."""
    pieces, before = [], 0
    total = max(total, sum(amount for _, _, amount, _ in parts), 1)
    for kind, label, amount, value in parts:
        x, end = round(before * BAR / total), round((before + amount) * BAR / total)
        before += amount
        if amount or keep_empty:
            pieces.append(Piece(kind, x, max(end - x, 1 if amount else 0), label, value, f"{amount / total:.1%}"))
    return pieces


def _count(value: int) -> str:
    return f"{value:,}".replace(",", "\u2009")


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:,.1f} ms".replace(",", "\u2009")


def _age(seconds: float) -> str:
    whole = int(seconds)
    if whole < 100:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 6000:
        return f"{whole // 60} min"
    return f"{whole // 3600} h" if whole < 200_000 else f"{whole // 86_400} d"


def _words(name: str) -> str:
    return name.replace("_", " ")
