"""A real model with a sliding window, in engines that give its old blocks back: the tokens are those of transformers,
computed in one engine or handed over from another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from factories import fake_identity
from families import load_family
from tiny_llama import fill_with_nan

from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine, Reservation
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.model.decoder import Model
from engine.model.registry import load_model
from engine.request import Request, RequestKind, RequestStatus
from engine.sampling_params import SamplingParams

FAMILY = load_family("mistral")
WINDOW, BLOCK_SIZE = 24, 4
PROMPT, GREEDY = FAMILY.token_ids[: FAMILY.num_prompt], FAMILY.greedy  # 40 tokens, 24 tokens
FIRST_NEEDED = (len(PROMPT) - WINDOW) // BLOCK_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(FAMILY.write(tmp_path_factory.mktemp("mistral")), "float32")


@dataclass
class Worker:
    """An engine whose pool begins full of NaN, and what came out of it."""

    model: Model
    num_blocks: int = 40
    outputs: dict[str, list[int]] = field(default_factory=dict)
    most_owned: int = 0
    grants: dict[str, Reservation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.model.config
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            dtype="float32",
        )
        self.kv = KvCache(layout, self.num_blocks)
        fill_with_nan(self.kv)
        cache = CacheConfig(num_blocks=self.num_blocks, block_size=BLOCK_SIZE, sliding_window=config.shared_window)
        scheduler = SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=4)
        self.engine = Engine(self.model, self.kv, cache, scheduler, fake_identity(BLOCK_SIZE), 256)

    def run(self) -> None:
        while self.engine.has_work():
            for update in self.engine.step().updates:
                assert update.error is None, update.error
                if update.token is not None:
                    self.outputs.setdefault(update.request_id, []).append(update.token.token_id)
            self.engine.check_integrity()
            self.most_owned = max(self.most_owned, self.engine.stats().blocks.owned)

    def reserve(self, request: Request) -> Reservation:
        self.engine.reserve(request, lambda grant: self.grants.update({grant.request_id: grant}))
        self.engine.step()
        self.engine.check_integrity()
        return self.grants[request.request_id]


@pytest.fixture
def worker(model: Model) -> Iterator[Worker]:
    made = Worker(model)
    yield made
    made.engine.check_integrity()
    made.kv.close()


@pytest.fixture
def prefill(model: Model) -> Iterator[Worker]:
    made = Worker(model)
    yield made
    made.engine.check_integrity()
    made.kv.close()


def request(name: str, kind: RequestKind = RequestKind.LOCAL, prompt: list[int] = PROMPT) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=len(GREEDY), ignore_eos=True)
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        params=params,
        scope=b"tenant",
        arrival=0.0,
        kind=kind,
    )


def test_tokens_are_those_of_transformers_and_blocks_behind_the_window_are_given_back(worker: Worker) -> None:
    one = request("a")
    worker.engine.submit(one)
    worker.run()

    assert worker.outputs["a"] == GREEDY
    end = len(PROMPT) + len(GREEDY)
    assert worker.most_owned < end // BLOCK_SIZE
    assert worker.engine.stats().blocks.owned == 0


def test_a_prefix_hit_of_blocks_that_left_the_window_is_valid(worker: Worker) -> None:
    for name in ("a", "b"):
        worker.engine.submit(request(name))
        worker.run()

    again = request("c", prompt=[*PROMPT, *GREEDY[:9]])
    worker.engine.submit(again)
    worker.run()

    assert worker.outputs["b"] == GREEDY
    assert worker.outputs["c"][:15] == GREEDY[9:]
    assert again.num_cached_tokens > len(PROMPT)


def test_a_small_pool_serves_more_than_whole_contexts_of_it_would_fit(model: Model) -> None:
    tight = Worker(model, num_blocks=18)
    for name in ("a", "b"):
        tight.engine.submit(request(name))
    tight.run()

    assert tight.outputs == {"a": GREEDY, "b": GREEDY}
    tight.kv.close()


def hand_over(prefill: Worker, worker: Worker, arrived: set[int] | None = None) -> Request:
    """Bring those of the missing blocks (all by default) that have arrived, then let the rest be computed."""
    source, decoding = request("p", RequestKind.PREFILL), request("d", RequestKind.DECODE)
    prefill.engine.submit(source)
    prefill.run()
    grant = worker.reserve(decoding)
    for block in grant.missing:
        if arrived is None or block.ordinal in arrived:
            worker.kv.block(block.slot)[:] = prefill.kv.block(source.block_table[block.ordinal])
            worker.engine.adopted("d", block.ordinal)
    worker.engine.give_up_transfer("d")
    worker.engine.start("d", prefill.outputs["p"])
    prefill.engine.release_held("p")
    worker.run()
    return decoding


def test_only_blocks_that_are_still_needed_come_over_the_link(prefill: Worker, worker: Worker) -> None:
    decoding = hand_over(prefill, worker)

    assert [block.ordinal for block in worker.grants["d"].missing] == list(range(FIRST_NEEDED, 10))
    assert worker.grants["d"].cached_tokens == 0
    assert prefill.outputs["p"] + worker.outputs["d"] == GREEDY
    assert decoding.num_recomputed_tokens == 0


@pytest.mark.parametrize("arrived", [set(), {5, 6}, {4, 5, 6, 7, 8}, {4, 5, 7, 9}], ids=str)
def test_what_did_not_arrive_is_computed_with_all_that_it_looks_back_on(
    prefill: Worker, worker: Worker, arrived: set[int]
) -> None:
    decoding = hand_over(prefill, worker, arrived)

    assert decoding.status is RequestStatus.FINISHED
    assert prefill.outputs["p"] + worker.outputs["d"] == GREEDY
    assert decoding.num_recomputed_tokens == len(PROMPT)


def test_blocks_without_their_beginning_are_found_by_nobody(prefill: Worker, worker: Worker) -> None:
    hand_over(prefill, worker)

    again = request("again")
    worker.engine.submit(again)
    worker.run()

    assert again.num_cached_tokens == 0
    assert worker.outputs["again"] == GREEDY
