"""Small engines around `FakeModel`, requests for them, and the hands of a link: all that engine tests begin with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from fakes import HEAD_DIM, MAX_MODEL_LEN, NUM_LAYERS, FakeModel, expected_output

from engine.batch import ForwardBatch
from engine.block_hash import BlockIdentity
from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine, RequestUpdate, Reservation, StepOutput
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.request import Request, RequestKind
from engine.sampling_params import SamplingParams

BLOCK_SIZE = 4
FINGERPRINT = b"f" * 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)

_numbers = itertools.count()


def fake_layout(block_size: int = BLOCK_SIZE) -> KvLayout:
    return KvLayout(num_layers=NUM_LAYERS, num_kv_heads=1, head_dim=HEAD_DIM, block_size=block_size, dtype="float32")


def fake_identity(block_size: int = BLOCK_SIZE) -> BlockIdentity:
    return BlockIdentity(model_fingerprint=FINGERPRINT, kv_dtype="float32", block_size=block_size)


def make_request(
    prompt: Sequence[int],
    *,
    request_id: str | None = None,
    kind: RequestKind = RequestKind.LOCAL,
    params: SamplingParams = GREEDY,
    max_tokens: int | None = None,
    output: Sequence[int] = (),
    scope: bytes = b"tenant",
    priority: int = 0,
    num_public_tokens: int = 0,
    arrival: float = 0.0,
) -> Request:
    """Greedy unless `params` says otherwise. `output` are tokens that were emitted before a resume."""
    return Request(
        request_id=request_id or f"r{next(_numbers)}",
        token_ids=[*prompt, *output],
        num_prompt_tokens=len(prompt),
        params=params if max_tokens is None else replace(params, max_tokens=max_tokens),
        scope=scope,
        arrival=arrival,
        kind=kind,
        priority=priority,
        num_public_tokens=num_public_tokens,
    )


def kv_of(tokens: Sequence[int], block_size: int = BLOCK_SIZE) -> list[bytes]:
    """Contents of the blocks that hold the KV of `tokens`, as a prefill worker computes them. The tail is zero."""
    num_blocks = -(-len(tokens) // block_size)
    kv = KvCache(fake_layout(block_size), num_blocks)
    batch = ForwardBatch(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(len(tokens)),
        query_starts=[0, len(tokens)],
        context_lens=[len(tokens)],
        block_tables=[list(range(num_blocks))],
        sample_rows=[],
    )
    FakeModel().forward(batch, kv)
    contents = [bytes(kv.block(block)) for block in range(num_blocks)]
    kv.close()
    return contents


class EngineHarness:
    """An engine, and what came out of it. Every step checks the invariants and that no index is lost or repeated."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        max_num_batched_tokens: int = 16,
        max_num_seqs: int = 8,
        max_waiting: int = 64,
        max_model_len: int = MAX_MODEL_LEN,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption: str = "recompute",
        model: FakeModel | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.model = model or FakeModel()
        self.kv = KvCache(fake_layout(block_size), num_blocks, num_host_blocks)
        self.engine = Engine(
            self.model,
            self.kv,
            CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching),
            SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_waiting=max_waiting,
                preemption=preemption,
            ),
            fake_identity(block_size),
            max_model_len,
            clock=clock,
        )
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        """All output tokens, those given with the request included."""
        self.ends: dict[str, RequestUpdate] = {}
        """The update with a finish reason or an error."""
        self.grants: dict[str, Reservation] = {}
        self._reserved: dict[str, list[int]] = {}
        """Tokens of each reservation: what a prefill worker computes."""

    def submit(self, request: Request) -> Request:
        self.engine.submit(request)
        return self._note(request)

    def fork(self, parent: Request, children: Sequence[Request]) -> None:
        self.engine.fork(parent.request_id, children)
        for child in children:
            self._note(child)

    def reserve(self, request: Request) -> Request:
        self.engine.reserve(request, lambda grant: self.grants.update({grant.request_id: grant}))
        self._reserved[request.request_id] = list(request.token_ids)
        return self._note(request)

    def start(self, request: Request, token_ids: Sequence[int]) -> None:
        self.engine.start(request.request_id, token_ids)
        self.outputs[request.request_id] += token_ids

    def bring(self, request: Request, ordinals: Sequence[int] | None = None) -> None:
        """Be the link: write these missing blocks (all of them by default) into their slots, and report them."""
        grant = self.grants[request.request_id]
        contents = kv_of(self._reserved[request.request_id], self.kv.layout.block_size)
        for block in grant.missing:
            if ordinals is None or block.ordinal in ordinals:
                self.kv.block(block.slot)[:] = contents[block.ordinal]
                self.engine.adopted(request.request_id, block.ordinal)

    def step(self) -> StepOutput:
        output = self.engine.step()
        self.engine.check_integrity()
        for update in output.updates:
            assert update.request_id not in self.ends, "an update after the end"
            produced = self.outputs[update.request_id]
            assert update.index == len(produced), "an output index was lost or repeated"
            if update.token is not None:
                produced.append(update.token.token_id)
            if update.finish_reason is not None or update.error is not None:
                self.ends[update.request_id] = update
        return output

    def run(self) -> None:
        """Step until nothing more happens by itself."""
        while self.engine.has_work():
            self.step()

    def expected(self, request: Request) -> list[int]:
        """What the output of a greedy request must be so far."""
        prompt = request.token_ids[: request.num_prompt_tokens]
        return expected_output(prompt, len(self.outputs[request.request_id]))

    def close(self) -> None:
        """The end of every test: nothing was lost."""
        self.engine.check_integrity()
        self.kv.close()

    def _note(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = request.token_ids[request.num_prompt_tokens :]
        return request


class HarnessFactory:
    """Makes harnesses and closes them all."""

    def __init__(self) -> None:
        self._made: list[EngineHarness] = []

    def __call__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        max_num_batched_tokens: int = 16,
        max_num_seqs: int = 8,
        max_waiting: int = 64,
        max_model_len: int = MAX_MODEL_LEN,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        preemption: str = "recompute",
        model: FakeModel | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> EngineHarness:
        harness = EngineHarness(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            preemption=preemption,
            model=model,
            clock=clock,
        )
        self._made.append(harness)
        return harness

    def close(self) -> None:
        for harness in self._made:
            harness.close()
