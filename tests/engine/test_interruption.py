from __future__ import annotations

import pytest
import torch
from factories import HarnessFactory, make_request
from fakes import FakeModel
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ForwardBatch, ScheduledBatch, ScheduledSequence
from engine.interruption import PASS_TOKENS, CancelWatch, PassStopped, pays
from engine.kv_cache import KvCache
from engine.request import Request

PROMPT = list(range(30, 50))


@pytest.mark.parametrize(
    ("num_cancelled", "num_tokens", "share_done", "expected"),
    [(0, 512, 0.0, False), (1, 1, 0.9, True), (512, 512, 0.99, True), (256, 512, 0.4, True), (256, 512, 0.5, False)],
)
def test_a_pass_is_broken_off_while_more_of_it_is_cancelled_than_done(
    num_cancelled: int, num_tokens: int, share_done: float, expected: bool
) -> None:
    assert pays(num_cancelled, num_tokens, share_done) is expected


@given(st.integers(1, 4096), st.integers(0, 4096), st.floats(0, 1))
def test_who_is_left_never_waits_longer_for_it(num_others: int, num_cancelled: int, share_done: float) -> None:
    whole, again = num_others + num_cancelled + PASS_TOKENS, num_others + PASS_TOKENS
    if pays(num_cancelled, num_others + num_cancelled, share_done):
        assert share_done * whole + again <= whole * (1 + 1e-9)


def batch_of(*requests: Request) -> ScheduledBatch:
    return ScheduledBatch(tuple(ScheduledSequence(request, len(request.token_ids), True) for request in requests))


def test_only_what_the_pass_computes_and_is_doomed_counts() -> None:
    a, b, elsewhere = (make_request(PROMPT, request_id=name) for name in ("a", "b", "elsewhere"))
    watch = CancelWatch(num_layers=2, all_or_none=False)
    watch.doom("elsewhere")
    watch.doom("b")
    watch.forget("b")
    with watch.watching(batch_of(a, b)) as control:
        control.layers_done = 1
        assert not control.stop
        watch.doom("a")
        assert not control.stop  # half is done, half is cancelled
        watch.doom("b")
        assert control.stop
    with watch.watching(batch_of(elsewhere)) as control:
        assert control.stop


def test_where_a_second_pass_would_store_other_kv_all_must_be_cancelled() -> None:
    a, b = make_request(PROMPT * 5, request_id="a"), make_request([1], request_id="b")
    watch = CancelWatch(num_layers=2, all_or_none=True)
    with watch.watching(batch_of(a, b)) as control:
        watch.doom("a")
        assert not control.stop
        watch.doom("b")
        assert control.stop


def test_a_sample_that_draws_along_still_wants_the_pass() -> None:
    parent, child = make_request(PROMPT), make_request(PROMPT)
    parent.samples.append(child)
    child.sample_of = parent
    watch = CancelWatch(num_layers=2, all_or_none=False)
    with watch.watching(batch_of(parent)) as control:
        watch.doom(parent.request_id)
        assert not control.stop


class CancelledInside(FakeModel):
    """Looks at the control as a real one does: once `doomed` were doomed, which write garbage first, as all do."""

    doomed: tuple[str, ...] = ()
    watch: CancelWatch

    def forward(self, batch: ForwardBatch, kv: KvCache) -> torch.Tensor:
        for request_id in self.doomed:
            self.watch.doom(request_id)
        assert batch.control is not None
        if batch.control.stop:
            self.fault = PassStopped()
        return super().forward(batch, kv)


def test_a_pass_that_is_broken_off_costs_the_others_nothing_and_leaves_nothing(make_engine: HarnessFactory) -> None:
    model = CancelledInside()
    harness = make_engine(model=model, max_num_batched_tokens=64)
    model.watch = harness.engine._runner.cancels
    long, short = harness.submit(make_request(list(range(100, 150)))), harness.submit(make_request(PROMPT[:5]))
    model.doomed = (long.request_id,)

    assert harness.step().updates == ()
    assert not harness.engine.take_block_events().events
    assert short.num_computed_tokens == 0

    model.doomed = ()
    harness.engine.cancel(long.request_id)
    harness.run()
    assert harness.outputs[short.request_id] == harness.expected(short)
    assert model.watch._doomed == set()
