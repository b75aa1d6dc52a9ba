"""The other end of a link, in a process of its own that a test tells what to do, kills and stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kv_links import WAIT_S, DecodeSide, only


class LinkProcess:
    def __init__(self, script: str, *arguments: str) -> None:
        support = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, str(support / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": f"{support.parents[1]}:{support}"},
        )
        self.first_words = self.says()
        assert self.first_words.startswith("ready"), self.first_words

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, command: str, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command} {json.dumps(what)}\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)

    def begin(self, decode: DecodeSide, transport: str, ticket_id: str, slots: Sequence[int], generation: int) -> None:
        """Of a sender."""
        expected = decode.expect(ticket_id, slots, generation)
        endpoint = only(decode.receiver.endpoint(), transport).hex()
        self.tell("open", ticket_id=ticket_id, endpoint=endpoint, slots=expected, generation=generation)

    def begin_as_offered(self, decode: DecodeSide, ticket_id: str, slots: Sequence[int]) -> None:
        """Of a sender: with the receiver's own endpoint and layout, as a router hands them on."""
        expected = decode.expect(ticket_id, slots)
        endpoint, layout = decode.receiver.endpoint().hex(), decode.pool.layout.to_wire()
        self.tell("open", ticket_id=ticket_id, endpoint=endpoint, slots=expected, generation=1, layout=layout)


@contextmanager
def _running(process: LinkProcess) -> Iterator[LinkProcess]:
    try:
        yield process
    finally:
        process.process.kill()
        process.process.communicate(timeout=WAIT_S)


def sender_process(size: str, transports: str, *options: str) -> AbstractContextManager[LinkProcess]:
    """Of `kv_sender_process.py`."""
    return _running(LinkProcess("kv_sender_process.py", size, transports, *options))


def receiver_process() -> AbstractContextManager[LinkProcess]:
    """Of `kv_receiver_process.py`."""
    return _running(LinkProcess("kv_receiver_process.py"))
