"""Client input to token ids without holding the event loop up: short texts at once, long ones in processes of our own.

Owns those processes. What is refused, and why, is said in `validate`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from engine.errors import QueueFull
from kvrelay.v1 import router_pb2
from router import validate
from router.config import RouterConfig
from router.served_model import ServedModel
from router.tokenizer_process import TokenizerProcess

INLINE_BYTES = 4 * 1024
"""Up to here an encoding takes the event loop a few milliseconds: less than the way to another process and back costs
while that is busy."""


class Prompts:
    """Invariant: a process is idle, or in use by one `tokens` call, or killed; never two of these."""

    def __init__(self, config: RouterConfig, model: ServedModel) -> None:
        self._model = model
        self._max_prompt_bytes = config.max_prompt_bytes
        self._max_waiting = config.max_live_requests
        self._places = asyncio.Semaphore(config.tokenizer_processes)
        self._threads = ThreadPoolExecutor(config.tokenizer_processes, thread_name_prefix="tokenizer")
        """They wait for the answers."""
        self._idle: list[TokenizerProcess] = []
        self._in_use: set[TokenizerProcess] = set()
        self._waiting = 0

    async def tokens(self, message: router_pb2.GenerateRequest | router_pb2.TokenizeRequest, timeout_s: float) -> bytes:
        """Token ids of the input, little-endian u32; at least one. Raises `RequestError`, or `QueueFull` if as many
        long texts wait as there may be requests.

        A call that is cancelled has ended the work on its text; `timeout_s` does the same if this process dies.
        """
        model = self._model
        validate.check_input(message, model, self._max_prompt_bytes)
        if isinstance(message, router_pb2.GenerateRequest) and message.HasField("prompt_token_ids"):
            return bytes(message.prompt_token_ids)
        if message.ByteSize() <= INLINE_BYTES:
            return validate.tokenize(message, model.tokenizer, model.max_model_len)
        if self._waiting >= self._max_waiting:
            raise QueueFull(f"{self._waiting} long prompts wait to be tokenized, which is the limit; try again later")
        self._waiting += 1
        try:
            async with self._places:
                return await self._in_a_process(_input_of(message), timeout_s)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the processes. Idempotent; calls that are still under way fail, and none may follow."""
        for process in self._in_use:
            process.kill()
        self._threads.shutdown()  # at once: a thread waits for nothing but its process
        while self._idle:
            self._idle.pop().close()

    def check_idle(self) -> None:
        assert self._waiting == 0, f"{self._waiting} texts are still being tokenized"
        assert not self._in_use, "a process works for nobody"

    async def _in_a_process(self, question: router_pb2.TokenizeRequest, timeout_s: float) -> bytes:
        process = self._take()
        self._in_use.add(process)
        answer = self._threads.submit(process.tokenize, question, timeout_s)
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._in_use.discard(process)
            if answer.done() and not process.ended:
                self._idle.append(process)
            else:
                process.kill()
                answer.cancel()
                answer.add_done_callback(lambda _: process.close())  # where its thread lets go of it

    def _take(self) -> TokenizerProcess:
        while self._idle:
            process = self._idle.pop()
            if not process.ended:
                return process
            process.close()
        return TokenizerProcess(self._model.folder, self._model.max_model_len)


def _input_of(message: router_pb2.GenerateRequest | router_pb2.TokenizeRequest) -> router_pb2.TokenizeRequest:
    if message.HasField("chat"):
        return router_pb2.TokenizeRequest(chat=message.chat)
    return router_pb2.TokenizeRequest(prompt=message.prompt)
