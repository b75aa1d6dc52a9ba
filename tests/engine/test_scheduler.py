from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest
from factories import make_request
from scheduler_model import PolicyFactory, tokens

from bench.scheduler_load import StaticGrowth
from engine.errors import QueueFull, RequestError
from engine.growth import Stream
from engine.request import RequestKind, RequestStatus


class NeverTwo(StaticGrowth):
    """Sees room for no request beside another."""

    def __init__(self) -> None:
        super().__init__(1)

    def allows(self, running: Sequence[Stream], added: Stream, num_free: int, tokens_per_step: float) -> bool:
        return False


def test_a_long_prompt_is_computed_in_chunks_of_the_budget(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    request = policy.add(tokens(40))
    assert [policy.step() for _ in range(3)] == [[(request, 16)], [(request, 16)], [(request, 8)]]
    assert request.num_output_tokens == 1


def test_decode_goes_first_and_prefill_gets_what_is_left(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    decoding = policy.add(tokens(3))
    policy.step()
    prompt = policy.add(tokens(40, first=50))
    assert policy.step() == [(decoding, 1), (prompt, 15)]
    assert policy.step() == [(decoding, 1), (prompt, 15)]


def test_prompts_are_computed_in_the_order_of_acceptance(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    first, second, third = (policy.add(tokens(10, first=100 * i)) for i in range(3))
    assert policy.step() == [(first, 10), (second, 6)]
    assert policy.step() == [(first, 1), (second, 4), (third, 10)]


def test_nobody_overtakes_the_first_in_the_queue(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=10)
    running = policy.add(tokens(16))  # 5 blocks
    policy.step()
    large, small = policy.add(tokens(24, first=50)), policy.add(tokens(2, first=90))
    assert policy.step() == [(running, 1)]
    assert (large.status, small.status) == (RequestStatus.WAITING, RequestStatus.WAITING)


def test_no_more_run_than_max_num_seqs(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=2)
    for i in range(3):
        policy.add(tokens(2, first=10 * i))
    assert len(policy.step()) == 2


def test_a_reservation_takes_a_seat_but_no_tokens(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_num_seqs=2)
    reserved = policy.add(tokens(30), kind=RequestKind.DECODE)
    first, second = policy.add(tokens(2, first=40)), policy.add(tokens(2, first=50))
    assert policy.step() == [(first, 2)]
    assert (reserved.status, second.status) == (RequestStatus.AWAITING_KV, RequestStatus.WAITING)


def test_a_prompt_admitted_later_finds_what_was_computed_before(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    first, second = policy.add(tokens(16)), policy.add(tokens(16))
    assert policy.step() == [(first, 16)]
    assert policy.step() == [(first, 1), (second, 4)]
    assert second.num_cached_tokens == 12


def test_the_latest_is_preempted_when_an_older_one_must_grow(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=6)
    first, second = policy.add(tokens(4), max_tokens=17), policy.add(tokens(4, first=50), max_tokens=17)
    policy.step()
    third = policy.add(tokens(4, first=70), max_tokens=17)
    while third.status is not RequestStatus.RUNNING:
        policy.step()
    while third.status is RequestStatus.RUNNING:
        policy.step()
    assert third.block_table == []
    assert third.num_computed_tokens == 0
    assert third.token_ids[:5] == [*tokens(4, first=70), 7]
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.RUNNING)


def test_a_preempted_request_is_the_next_to_be_admitted(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=4)
    first, second = policy.add(tokens(4), max_tokens=9), policy.add(tokens(4, first=50), max_tokens=9)
    later = policy.add(tokens(1, first=90), max_tokens=1)
    while second.num_preemptions == 0:
        policy.step()
    while second.status is RequestStatus.WAITING:
        assert later.status is RequestStatus.WAITING
        policy.step()
    assert first.status is RequestStatus.FINISHED


def test_the_queue_stays_in_the_order_of_acceptance_whoever_is_preempted_first(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=8)
    oldest, second = policy.add(tokens(4), max_tokens=20), policy.add(tokens(4, first=20), max_tokens=20)
    reserved = policy.add(tokens(8, first=40), max_tokens=20, kind=RequestKind.DECODE)
    while second.num_preemptions == 0:
        policy.step()
    policy.scheduler.give_up_transfer(reserved)
    policy.scheduler.start(reserved)
    while reserved.num_preemptions == 0:
        policy.step()
    assert second.status is RequestStatus.WAITING
    policy.scheduler.finish(oldest)
    assert policy.step()[0][0] is second


def test_a_request_alone_grows_into_the_whole_pool(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=5)
    request = policy.add(tokens(4), max_tokens=17)  # 20 tokens with KV
    while policy.scheduler.has_work():
        policy.step()
    assert request.num_output_tokens == 17
    assert request.num_preemptions == 0


def test_blocks_that_await_kv_are_not_preempted_and_the_oldest_sits_out(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=5)
    running = policy.add(tokens(4), max_tokens=17)
    policy.step()
    reserved = policy.add(tokens(8, first=50), max_tokens=2, kind=RequestKind.DECODE)
    while policy.scheduler.has_work():
        policy.step()
    assert reserved.status is RequestStatus.AWAITING_KV
    assert running.status is RequestStatus.RUNNING
    assert len(running.token_ids) == 9  # the 9th has no block

    policy.scheduler.finish(reserved)  # its lease ran out
    while policy.scheduler.has_work():
        policy.step()
    assert running.num_output_tokens == 17


def test_what_comes_free_goes_to_the_oldest_before_anybody_is_admitted(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=6)
    running = policy.add(tokens(4), max_tokens=17)
    policy.step()
    reserved = policy.add(tokens(8, first=50), max_tokens=2, kind=RequestKind.DECODE)
    policy.step()
    running.token_ids += [7] * 8  # needs 2 more blocks, 1 is free
    waiting = policy.add(tokens(1, first=90), max_tokens=1)
    policy.step()
    assert waiting.status is RequestStatus.WAITING
    policy.scheduler.finish(reserved)
    assert [request for request, _ in policy.step()] == [running, waiting]


def test_a_prompt_that_a_link_reads_is_not_preempted(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=8, budget=4)
    running = policy.add(tokens(4), max_tokens=13)
    policy.step()
    sending = policy.add(tokens(24, first=50), kind=RequestKind.PREFILL)  # all other blocks, in 8 chunks
    while policy.scheduler.has_work():
        policy.step()
    assert sending.status is RequestStatus.HELD
    assert sending.num_preemptions == 0
    assert len(running.token_ids) == 9  # waits for the transfer to end
    policy.scheduler.finish(sending)
    while policy.scheduler.has_work():
        policy.step()
    assert running.num_output_tokens == 13


def test_the_oldest_is_never_preempted(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=7)
    requests = [policy.add(tokens(4, first=20 * i), max_tokens=17) for i in range(4)]
    while policy.scheduler.has_work():
        alive = [request for request in requests if request.status is RequestStatus.RUNNING]
        before = [request.num_preemptions for request in alive[:1]]
        policy.step()
        assert [request.num_preemptions for request in alive[:1]] == before
    assert all(request.num_output_tokens == 17 for request in requests)
    assert policy.scheduler.stats().preemptions > 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        (90, 11, "90 prompt tokens and max_tokens 11 exceed max_model_len 100"),
        (20, 14, "may need 9 blocks of 4 tokens; the pool has 8"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    make_policy: PolicyFactory, prompt: int, max_tokens: int, words: str
) -> None:
    policy = make_policy(num_blocks=8)
    with pytest.raises(RequestError, match=words) as caught:
        policy.add(tokens(prompt), max_tokens=max_tokens)
    assert caught.value.field == "max_tokens"
    assert len(policy.scheduler.live) == 0


def test_what_fits_exactly_is_accepted(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=8)
    request = policy.add(tokens(20), max_tokens=13)
    while policy.scheduler.has_work():
        policy.step()
    assert request.num_output_tokens == 13


def test_a_finished_output_cannot_be_resumed(make_policy: PolicyFactory) -> None:
    policy = make_policy()
    with pytest.raises(RequestError, match="2 were drawn already"):
        policy.scheduler.add(make_request([1], output=[2, 3], max_tokens=2))


def test_one_id_is_live_once(make_policy: PolicyFactory) -> None:
    policy = make_policy()
    policy.scheduler.add(make_request([1], request_id="same"))
    with pytest.raises(RequestError, match="live already"):
        policy.scheduler.add(make_request([1], request_id="same"))


def test_the_queue_is_bounded(make_policy: PolicyFactory) -> None:
    policy = make_policy(max_waiting=2)
    policy.add([1])
    policy.add([2])
    with pytest.raises(QueueFull, match="max_waiting is 2"):
        policy.add([3])
    assert policy.scheduler.stats().waiting == 2


def test_waiting_tokens_are_those_to_compute_before_all_decode(make_policy: PolicyFactory) -> None:
    policy = make_policy(budget=16)
    policy.add(tokens(3))
    policy.step()
    policy.add(tokens(20, first=50))
    policy.add(tokens(30, first=20), kind=RequestKind.DECODE)  # its KV will come
    assert policy.scheduler.stats().waiting_tokens == 20
    policy.step()
    assert policy.scheduler.stats().waiting_tokens == 5


def test_there_is_no_work_while_everybody_waits_for_a_call(make_policy: PolicyFactory) -> None:
    policy = make_policy(num_blocks=5)
    reserved = policy.add(tokens(12), kind=RequestKind.DECODE)
    policy.add(tokens(12, first=50))
    assert policy.scheduler.has_work()
    policy.step()
    assert not policy.scheduler.has_work()
    policy.scheduler.finish(reserved)
    assert policy.scheduler.has_work()


def test_the_growth_policy_defers_a_request_only_while_another_runs(make_policy: PolicyFactory) -> None:
    policy = make_policy(growth=NeverTwo())
    reserved = policy.add(tokens(8), max_tokens=9, kind=RequestKind.DECODE)
    first, second = (policy.add(tokens(4, first=20 * i), max_tokens=9) for i in (1, 2))
    policy.step()
    assert reserved.status is RequestStatus.AWAITING_KV
    assert [first.status, second.status] == [RequestStatus.RUNNING, RequestStatus.WAITING]
    while policy.scheduler.has_work():
        policy.step()
    assert second.status is RequestStatus.FINISHED
    policy.scheduler.finish(reserved)


def test_the_scheduler_runs_without_torch() -> None:
    program = "import sys, engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
