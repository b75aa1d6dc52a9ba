"""Steady load on a cluster that is being changed: how many requests failed, how many answers were wrong."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import aiohttp

from engine.errors import EngineError
from kvrelay import AsyncClient, Generation

Prompt: TypeAlias = tuple[int, ...]
Answers: TypeAlias = Mapping[Prompt, tuple[int, ...]]

REQUEST_TIMEOUT_S = 60.0


@dataclass
class LoadResult:
    """A client refuses a repeated or skipped index as a failure; tokens that differ from those of a quiet cluster are
    wrong."""

    finished: int = 0
    resumed: int = 0
    """Finished on another worker than the first."""
    wrong: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return len(self.errors) + self.wrong


def make_prompts(count: int, vocabulary: Sequence[int], length: int) -> list[Prompt]:
    rng = random.Random(8)
    return [tuple(rng.choices(vocabulary, k=length)) for _ in range(count)]


async def ask(client: AsyncClient, prompt: Prompt, max_tokens: int) -> Generation:
    return await client.generate(
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        timeout_s=REQUEST_TIMEOUT_S,
    )


async def right_answers(client: AsyncClient, prompts: Sequence[Prompt], max_tokens: int) -> Answers:
    """While nothing else happens."""
    return {prompt: (await ask(client, prompt, max_tokens)).token_ids for prompt in prompts}


@asynccontextmanager
async def http_load(url: str, model: str, streams: int) -> AsyncIterator[LoadResult]:
    """Keep `streams` plain HTTP clients calling, half of which open a connection for each call. Nothing is tried again:
    aiohttp does so itself only for methods that may be repeated, and these are POST."""
    result, over = LoadResult(), asyncio.Event()
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    async def call(session: aiohttp.ClientSession) -> None:
        try:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                answer = await response.text()
                result.finished += response.status == 200
                result.errors += [] if response.status == 200 else [f"HTTP {response.status}: {answer}"]
        except (aiohttp.ClientError, TimeoutError) as error:
            result.errors.append(f"{type(error).__name__}: {error}")

    async def stream(keeps: bool) -> None:
        timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)
        while not over.is_set():
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await call(session)
                while keeps and not over.is_set():
                    await call(session)

    async with asyncio.TaskGroup() as tasks:
        for number in range(streams):
            tasks.create_task(stream(number % 2 == 0))
        try:
            yield result
        finally:
            over.set()


@asynccontextmanager
async def load(client: AsyncClient, answers: Answers, streams: int) -> AsyncIterator[LoadResult]:
    """Keep `streams` requests running; leaving the context lets those that run finish."""
    result, over = LoadResult(), asyncio.Event()
    prompts = itertools.cycle(answers)

    async def stream() -> None:
        while not over.is_set():
            prompt = next(prompts)
            try:
                answer = await ask(client, prompt, len(answers[prompt]))
            except EngineError as error:
                result.errors.append(f"{type(error).__name__}: {error}")
                continue
            result.finished += 1
            result.resumed += answer.route.attempts > 1
            result.wrong += answer.token_ids != answers[prompt]

    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(stream())
        try:
            yield result
        finally:
            over.set()
