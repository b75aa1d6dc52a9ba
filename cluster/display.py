"""Draws the updates of `kvrelay up`: a live list on a terminal, one line an update elsewhere. Decides nothing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cluster.updates import Failed, MemberTrouble, Ready, StageBegan, StageDone, StageMoved, Update


class Display:
    """Use it as a context manager, and call it with each update. Writes to `console`, from any thread."""

    def __init__(self, console: Console, *, hints: bool = True) -> None:
        """`hints`: say what to type next once the cluster is ready."""
        self._console = console
        self._hints = hints
        self._lines: dict[str, _Line] = {}
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_drawing()

    def __call__(self, update: Update) -> None:
        match update:
            case StageBegan(stage, detail):
                self._lines[stage] = _Line(stage, detail)
            case StageMoved(stage, part, share):
                self._lines[stage].note = f"{part} {share:.0%}"
            case StageDone(stage, seconds, detail):
                self._lines[stage].finish(seconds, detail)
                self._say(self._lines[stage].text())
            case MemberTrouble(member_id, reason):
                self._lines.pop(member_id, None)
                self._say(Text(f"! {member_id:<12} {reason}", style="yellow"))
            case Ready():
                self._stop_drawing()
                self._console.print(ready_view(update, self._hints), soft_wrap=not self._console.is_terminal)
            case Failed():
                self._stop_drawing()  # the command prints the reason when it ends

    def _say(self, line: Text) -> None:
        # Elsewhere than on a terminal nobody knows the width: one line is one line.
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def _stop_drawing(self) -> None:
        if self._live.is_started:
            self._lines.clear()
            self._live.stop()

    def _view(self) -> RenderableType:
        """What is still going on; what is done was printed above."""
        return Group(*(line.spinner() for line in list(self._lines.values()) if not line.done))


class _Line:
    def __init__(self, stage: str, detail: str) -> None:
        self._stage = stage
        self._detail = detail
        self._began = time.monotonic()
        self._seconds: float | None = None
        self._spinner = Spinner("dots", style="cyan")
        self.note = ""

    @property
    def done(self) -> bool:
        return self._seconds is not None

    def spinner(self) -> RenderableType:
        seconds = time.monotonic() - self._began
        self._spinner.update(text=Text(f"{self._stage:<12} {seconds:5.1f} s  {self._detail} {self.note}", style="dim"))
        return self._spinner

    def finish(self, seconds: float, detail: str) -> None:
        self._seconds = seconds
        self._detail = detail or self._detail

    def text(self) -> Text:
        line = Text("✓ ", style="green")
        line.append(f"{self._stage:<12} {self._seconds or 0.0:5.1f} s  ", style="default")
        line.append(self._detail, style="dim")
        return line


def ready_view(ready: Ready, hints: bool) -> RenderableType:
    """The endpoints, and what to type next."""
    table = Table.grid(padding=(0, 2))
    table.add_row("router", Text(f"{ready.router_address} (gRPC)", style="bold"))
    table.add_row("", Text(f"{ready.http_url}/v1 (OpenAI-compatible)", style="bold"))
    table.add_row("Ray", ready.ray_address)
    if ready.log_path:
        table.add_row("log", ready.log_path)
    if hints:
        table.add_row("try", 'kvrelay generate "Why is the sky blue?"')
        table.add_row("stop", "kvrelay down" if ready.log_path else "Ctrl-C, or kvrelay down")
    headline = Text(f"cluster {ready.name} serves {ready.model}, ready after {ready.seconds:.1f} s", style="bold green")
    return Group(headline, table)
