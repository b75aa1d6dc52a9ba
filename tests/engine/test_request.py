from __future__ import annotations

import itertools

import pytest
from factories import make_request

from engine.errors import InternalError, RequestError
from engine.request import FinishReason, RequestKind, RequestStatus
from engine.sampling_params import SamplingParams

EOS = (99, 98)
LEGAL = {
    (RequestStatus.WAITING, RequestStatus.AWAITING_KV),
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.AWAITING_KV, RequestStatus.RUNNING),
    (RequestStatus.AWAITING_KV, RequestStatus.HELD),
    (RequestStatus.AWAITING_KV, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.WAITING),
    (RequestStatus.RUNNING, RequestStatus.HELD),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
    (RequestStatus.HELD, RequestStatus.FINISHED),
}


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1 token") as caught:
        make_request([])
    assert caught.value.field == "prompt_token_ids"


def test_no_more_tokens_are_public_than_the_prompt_has() -> None:
    assert make_request([1, 2], output=[3], num_public_tokens=2).num_public_tokens == 2
    with pytest.raises(RequestError, match=r"must be in \[0, 2\]") as caught:
        make_request([1, 2], output=[3], num_public_tokens=3)
    assert caught.value.field == "num_public_tokens"


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestStatus, RequestStatus)))
def test_status_changes_follow_the_table(before: RequestStatus, after: RequestStatus) -> None:
    request = make_request([1])
    request.status = before
    if (before, after) in LEGAL:
        request.transition(after)
        assert request.status is after
    else:
        with pytest.raises(InternalError, match="cannot become"):
            request.transition(after)
        assert request.status is before


def test_stop_tokens_are_banned_until_min_tokens_are_drawn() -> None:
    request = make_request([1, 2], params=SamplingParams(min_tokens=2, stop_token_ids=(5,)))
    assert request.banned_token_ids(EOS) == (99, 98, 5)
    request.token_ids.append(7)
    assert request.banned_token_ids(EOS) == (99, 98, 5)
    request.token_ids.append(7)
    assert request.banned_token_ids(EOS) == ()


def test_tokens_emitted_before_a_resume_count_as_output() -> None:
    request = make_request([1, 2], output=[3, 4], params=SamplingParams(min_tokens=2, max_tokens=3))
    assert request.num_output_tokens == 2
    assert request.banned_token_ids(EOS) == ()
    request.token_ids.append(5)
    assert request.finish_reason(EOS) is FinishReason.LENGTH


@pytest.mark.parametrize("token_id", EOS)
def test_every_end_of_sequence_token_stops(token_id: int) -> None:
    request = make_request([1], output=[token_id])
    assert request.finish_reason(EOS) is FinishReason.STOP


def test_end_of_sequence_can_be_ignored_but_a_stop_token_cannot() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(98,))
    assert make_request([1], output=[99], params=params).finish_reason(EOS) is None
    assert make_request([1], output=[98], params=params).finish_reason(EOS) is FinishReason.STOP


def test_a_stop_token_as_last_allowed_token_is_a_stop() -> None:
    request = make_request([1], output=[99], params=SamplingParams(max_tokens=1))
    assert request.finish_reason(EOS) is FinishReason.STOP


def test_the_last_token_needs_no_kv() -> None:
    params = SamplingParams(max_tokens=3)
    assert make_request([1, 2], params=params).max_kv_tokens == 4
    assert make_request([1, 2], params=params, kind=RequestKind.PREFILL).max_kv_tokens == 2
