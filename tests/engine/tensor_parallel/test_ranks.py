from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from factories import make_request
from rank_threads import RankThreads
from worker_process import make_tiny_model

from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.errors import ConfigError, WorkerLost
from engine.model.registry import load_model
from engine.tensor_parallel.messages import Join
from worker.engine_builder import assemble_engine

PROMPTS = [[(7 * i + 13 * j) % 500 for i in range(45)] for j in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def settings(model: Path, size: int = 2) -> EngineConfig:
    return EngineConfig(
        model_path=str(model),
        dtype="float32",
        block_size=8,
        num_blocks_override=48,
        tensor_parallel_size=size,
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
    )


def outputs(engine: Engine) -> list[list[int]]:
    """Of three prompts in chunks, together; and of one that begins as they do, which finds that in the cache."""
    tokens: dict[str, list[int]] = {}
    for prompts in (PROMPTS, [[*PROMPTS[0][:40], 3, 5, 7]]):
        for prompt in prompts:
            request = make_request(prompt, max_tokens=10)
            tokens[request.request_id] = []
            engine.submit(request)
        while engine.has_work():
            for update in engine.step().updates:
                assert update.error is None, update.error
                if update.token is not None:
                    tokens[update.request_id].append(update.token.token_id)
        engine.check_integrity()
    return list(tokens.values())


def test_two_ranks_draw_the_tokens_of_one_in_chunks_and_behind_a_cached_prefix(model: Path, stack: ExitStack) -> None:
    alone = assemble_engine(load_model(model, "float32"), bytes(32), settings(model, 1))
    stack.callback(alone.kv.close)
    ranks = RankThreads(settings(model))
    stack.callback(ranks.close)
    shared = assemble_engine(ranks.load_model(), bytes(32), settings(model), None, ranks.share_pool)
    ranks.watch()
    stack.callback(shared.kv.close)

    assert outputs(shared.engine) == outputs(alone.engine)
    assert shared.identity == alone.identity
    assert shared.kv.layout == alone.kv.layout


def test_the_end_of_a_rank_is_told_once_with_its_number_and_fails_the_step(model: Path, stack: ExitStack) -> None:
    told: list[WorkerLost] = []
    heard = threading.Event()

    def on_lost(error: WorkerLost) -> None:
        told.append(error)
        heard.set()

    ranks = RankThreads(settings(model), on_lost)
    stack.callback(ranks.close)
    parts = assemble_engine(ranks.load_model(), bytes(32), settings(model), None, ranks.share_pool)
    ranks.watch()
    stack.callback(parts.kv.close)
    ranks._channels[0].send(Join())  # which a rank does not expect any more

    assert heard.wait(30)
    assert str(told[0]) == "rank 1 of 2: ProtocolError: Join, which a rank does not expect now"
    parts.engine.submit(make_request(PROMPTS[0]))
    assert "WorkerLost: a step on 2 ranks failed" in str(parts.engine.step().updates[0].error)


def test_heads_that_cannot_be_shared_out_are_refused_before_anything_is_started(model: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 3 does not divide the model's num_kv_heads 2"):
        RankThreads(settings(model, 3))
