"""Long prompts, tokenized by processes of the router's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from router_fleet import CONFIG, make_served_model

from engine.block_hash import unpack_tokens
from engine.errors import InternalError, QueueFull, RequestError
from kvrelay.v1 import router_pb2
from router.prompts import INLINE_BYTES, Prompts
from router.served_model import ServedModel
from router.tokenizer_process import TokenizerProcess

LONG = "naïve " * INLINE_BYTES
SETTINGS = replace(CONFIG, tokenizer_processes=1, max_live_requests=2)


def question(text: str = LONG) -> router_pb2.TokenizeRequest:
    return router_pb2.TokenizeRequest(prompt=text.encode())


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_served_model(tmp_path_factory.mktemp("model"), max_model_len=1_000_000)


@pytest.fixture
async def prompts(large_model: ServedModel) -> AsyncIterator[Prompts]:
    prompts = Prompts(SETTINGS, large_model)
    yield prompts
    prompts.check_idle()
    prompts.close()


class Stopped:
    """Processes that are stopped in the middle of their first question, which they have got but never answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pids: list[int] = []
        self.asked = asyncio.Semaphore(0)
        loop, real = asyncio.get_running_loop(), TokenizerProcess.tokenize

        def tokenize(process: TokenizerProcess, message: router_pb2.TokenizeRequest, timeout_s: float) -> bytes:
            os.kill(process.pid, signal.SIGSTOP)
            self.pids.append(process.pid)
            loop.call_soon_threadsafe(self.asked.release)
            return real(process, message, timeout_s)

        monkeypatch.setattr(TokenizerProcess, "tokenize", tokenize)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("kind", ["prompt", "chat"])
async def test_a_long_text_gets_the_tokens_that_the_tokenizer_gives(
    prompts: Prompts, large_model: ServedModel, kind: str
) -> None:
    message, expected = question(), large_model.tokenizer.encode(LONG)
    if kind == "chat":
        turn = router_pb2.ChatMessage(role="user", content=LONG)
        message = router_pb2.TokenizeRequest(chat=router_pb2.ChatMessages(messages=[turn]))
        expected = large_model.tokenizer.encode(f"user: {LONG}\nassistant: ")

    assert unpack_tokens(await prompts.tokens(message, 60)) == expected


async def test_a_short_text_needs_no_process(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.prompts.TokenizerProcess", None)

    assert unpack_tokens(await prompts.tokens(question("ab"), 60)) == [97, 98]


async def test_a_process_is_kept_for_the_next_text_also_after_one_that_it_refused(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prompts.tokens(question(), 60)
    monkeypatch.setattr("router.prompts.TokenizerProcess", None)
    with pytest.raises(RequestError, match="prompt: must be UTF-8: invalid start byte at byte 9000"):
        await prompts.tokens(router_pb2.TokenizeRequest(prompt=b"x" * 9000 + b"\xff"), 60)

    assert len(await prompts.tokens(question(), 60)) == len(LONG.encode()) * 4


async def test_a_cancel_ends_the_process_that_works_on_the_text_and_the_next_text_gets_another(
    prompts: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stopped = Stopped(patch)
        call = asyncio.create_task(prompts.tokens(question(), 600))
        await stopped.asked.acquire()
        call.cancel()
        await asyncio.wait({call})

    assert call.cancelled()
    assert len(await prompts.tokens(question(), 60)) == len(LONG.encode()) * 4
    prompts.close()
    assert not is_alive(stopped.pids[0])


async def test_a_process_that_dies_fails_its_text_only(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stopped = Stopped(patch)
        call = asyncio.create_task(prompts.tokens(question(), 600))
        await stopped.asked.acquire()
        os.kill(stopped.pids[0], signal.SIGKILL)
        with pytest.raises(InternalError, match="the tokenizer process is gone, with status -9"):
            await call

    assert len(await prompts.tokens(question(), 60)) == len(LONG.encode()) * 4


async def test_only_so_many_texts_may_wait(prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Stopped(monkeypatch)
    calls = [asyncio.create_task(prompts.tokens(question(), 600)) for _ in range(2)]
    await stopped.asked.acquire()
    with pytest.raises(QueueFull, match="2 long prompts wait"):
        await prompts.tokens(question(), 600)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)

    assert len(stopped.pids) == 1


async def test_closing_ends_the_processes_idle_or_not(
    large_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = Prompts(SETTINGS, large_model)
    stopped = Stopped(monkeypatch)
    call = asyncio.create_task(prompts.tokens(question(), 600))
    await stopped.asked.acquire()
    prompts.close()
    with pytest.raises(InternalError):
        await call

    assert not is_alive(stopped.pids[0])


def test_a_process_whose_router_is_gone_ends_by_itself(large_model: ServedModel) -> None:
    process = TokenizerProcess(large_model.folder, large_model.max_model_len)
    try:
        process.tokenize(question(), 60)
        stdin = process._process.stdin
        assert stdin is not None
        stdin.close()

        assert process._process.wait(60) == 0
    finally:
        process.close()
