"""Several outputs of one prompt (`n`): what tells one from the other, and how they share the client's stream.

Each choice is a request of its own, with its own token log, placement and resume. They have one admission, one deadline
and one terminal status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from engine.errors import EngineError
from engine.parallel_sampling import sample_seed
from kvrelay._wire import sampling_to_proto
from kvrelay.v1 import router_pb2
from router.client_stream import Emit
from router.request import GenerationRequest


def choice_of(request: GenerationRequest, number: int) -> GenerationRequest:
    """Choice `number` of `request`, which has a seed: equal to it but for the seed."""
    assert request.params.seed is not None, "the seed of a validated request is filled in"
    params = replace(request.params, seed=sample_seed(request.params.seed, number))
    return replace(request, params=params, sampling=sampling_to_proto(params))


def one_at_a_time(emit: Emit) -> Emit:
    """`emit` for several tasks: gRPC takes no second message of a stream before the first is written."""
    writing = asyncio.Lock()

    async def emit_alone(message: router_pb2.GenerateResponse) -> None:
        async with writing:
            await emit(message)

    return emit_alone


async def all_or_none(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once. The first error ends the others, and is raised as it is."""
    first, *others = works
    if not others:
        await first
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for work in (first, *others):
                tasks.create_task(work)
    except BaseExceptionGroup as group:
        ours = [error for error in group.exceptions if isinstance(error, EngineError)]
        raise (ours or group.exceptions)[0] from group
