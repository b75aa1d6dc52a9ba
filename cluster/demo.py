"""What `kvrelay demo` does with its cluster: one prompt, streamed to the terminal, and the account of it."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from cluster.processes import ProcessId
from cluster.spec import ClusterSpec, RouterSpec
from cluster.state import ClusterRecord
from kvrelay import AsyncClient
from kvrelay.summary import format_bytes, summarize

DEMO_SPEC = ClusterSpec(name="demo", router=RouterSpec(port=0))
TIMEOUT_S = 120.0


class Demo:
    """A `Job` of `cluster.launch`."""

    def __init__(self, console: Console, prompt: str, max_tokens: int, started: float) -> None:
        self._console = console
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._started = started

    async def __call__(self, record: ClusterRecord) -> None:
        """Raises the `EngineError` that the answer ended with."""
        ready_s = time.monotonic() - self._started
        self._console.print(f"\n> {self._prompt}", style="bold")
        messages = [{"role": "user", "content": self._prompt}]
        async with AsyncClient(record.router_address, timeout_s=TIMEOUT_S) as client:
            async with client.stream(messages=messages, max_tokens=self._max_tokens, temperature=0.0) as stream:
                held = ""  # blank space may be the end of the answer: it is shown when something follows it
                async for chunk in stream:
                    text = held + chunk.text
                    shown = text.rstrip()
                    held = text[len(shown) :]
                    self._console.out(shown, end="", highlight=False)
                generation = stream.result
        self._console.out(" … (max_tokens reached)" if generation.finish_reason == "length" else "")
        for line in summarize(generation):
            self._console.out(line, highlight=False)
        self._console.out(f"{'ready':<10}after {ready_s:.1f} s", highlight=False)
        self._console.out(f"{'memory':<10}{await asyncio.to_thread(_memory, record)}", highlight=False)


def _memory(record: ClusterRecord) -> str:
    """Resident memory of our own processes, with the pages that they share counted in each."""
    sizes = {member.member_id: member.process for member in record.members if member.process is not None}
    parts = {name: process.resident_bytes for name, process in {**sizes, "kvrelay": ProcessId.mine()}.items()}
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    return f"{format_bytes(sum(parts.values()))} resident without Ray's own: {listed}"
