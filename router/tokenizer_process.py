"""A process that tokenizes long prompts beside the router, and its other end.

Why a process: `tokenizers` keeps the interpreter's lock while it encodes, and so do chat templates, so in a thread a
long prompt would stop the router's event loop for seconds; and nothing but the end of a process stops an encoding that
has begun. Cutting the text into slices would need neither, but gives the same tokens only for some vocabularies.
"""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

from engine.errors import EngineError, InternalError
from engine.tokenizer import Tokenizer
from kvrelay._status import error_from_name
from kvrelay.v1 import router_pb2
from router.validate import tokenize

_QUESTION = struct.Struct("<II")
"""Bytes of the `TokenizeRequest` that follows; milliseconds after which nobody wants the answer any more."""
_ANSWER = struct.Struct("<?I")
"""Whether token ids follow, or an error's class and text; bytes of it."""
_MAX_MS = 2**32 - 1
_ORPHAN_MARGIN_S = 1.0
"""The router ends a question in time by itself; the process does so only if the router is gone."""


class TokenizerProcess:
    """The router's end. One question at a time; after any error but the text's own the process is of no use."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        command = [sys.executable, "-m", "router.tokenizer_process", str(folder), str(max_model_len)]
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def tokenize(self, question: router_pb2.TokenizeRequest, timeout_s: float) -> bytes:
        """Token ids, little-endian u32. Blocks; `kill` from another thread ends it.

        Raises what `tokenize` raises there, or, once the process is gone, `InternalError`.
        """
        data = question.SerializeToString()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, _QUESTION.pack(len(data), min(_MAX_MS, round(timeout_s * 1000))) + data)
            is_answer, size = _ANSWER.unpack(_read(self._process.stdout, _ANSWER.size))
            payload = _read(self._process.stdout, size)
        except (OSError, EOFError) as error:
            raise InternalError(f"the tokenizer process is gone, with status {self.close()}") from error
        if is_answer:
            return payload
        name, _, text = payload.decode().partition(":")
        raise error_from_name(name, text)

    def kill(self) -> None:
        """From any thread."""
        self._process.kill()

    def close(self) -> int:
        """Kill it and let go of its pipes; returns its exit status. For the one thread that may be in `tokenize`."""
        self._process.kill()
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return status


def main() -> None:
    """Answer until the router closes the pipe, which it also does by dying."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the router says when it is over
    folder, max_model_len = sys.argv[1:]
    tokenizer = Tokenizer.load(folder)
    with sys.stdin.buffer as questions, sys.stdout.buffer as answers:
        while len(head := questions.read(_QUESTION.size)) == _QUESTION.size:
            size, timeout_ms = _QUESTION.unpack(head)
            signal.setitimer(signal.ITIMER_REAL, timeout_ms / 1000 + _ORPHAN_MARGIN_S)  # its signal ends the process
            answers.write(_answer(questions.read(size), tokenizer, int(max_model_len)))
            answers.flush()
            signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(question: bytes, tokenizer: Tokenizer, max_model_len: int) -> bytes:
    try:
        payload, is_answer = tokenize(router_pb2.TokenizeRequest.FromString(question), tokenizer, max_model_len), True
    except EngineError as error:
        payload, is_answer = f"{type(error).__name__}:{error}".encode(), False
    return _ANSWER.pack(is_answer, len(payload)) + payload


def _write(pipe: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[pipe.write(rest) :]


def _read(pipe: IO[bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pipe.read(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


if __name__ == "__main__":
    main()
