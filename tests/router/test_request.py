from __future__ import annotations

import pytest

from engine.block_hash import pack_tokens
from engine.errors import ProtocolError
from engine.sampling_params import SamplingParams
from kvrelay._wire import sampling_to_proto
from router.request import GenerationRequest, TokenLog


@pytest.fixture
def log() -> TokenLog:
    params = SamplingParams(max_tokens=3, seed=1)
    request = GenerationRequest(
        request_id="r", prompt=pack_tokens([5, 6]), params=params, sampling=sampling_to_proto(params)
    )
    return TokenLog(request)


def test_tokens_are_the_prompt_then_the_output(log: TokenLog) -> None:
    log.take(0, [7, 2**32 - 1])
    assert log.tokens() == pack_tokens([5, 6, 7, 2**32 - 1])
    assert log.num_outputs == 2
    assert not log.full


@pytest.mark.parametrize("index", [0, 2, 7])
def test_a_repeated_or_skipped_index_is_refused_and_changes_nothing(log: TokenLog, index: int) -> None:
    log.take(0, [7])
    with pytest.raises(ProtocolError, match=f"output index {index} came where 1 of 3 was next"):
        log.take(index, [8])
    assert log.tokens() == pack_tokens([5, 6, 7])


def test_a_full_log_takes_no_more(log: TokenLog) -> None:
    with pytest.raises(ProtocolError):
        log.take(0, [7] * 4)
    assert log.num_outputs == 0
    for index in range(3):
        log.take(index, [7])
    assert log.full
    with pytest.raises(ProtocolError):
        log.take(3, [7])
    assert log.num_outputs == 3
