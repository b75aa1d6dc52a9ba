"""Wrong arguments are named before anything is sent; right ones are sent unchanged."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from fake_router import FakeRouter, running_fake_router

from engine.block_hash import pack_tokens
from engine.errors import RequestError
from engine.sampling_params import SamplingParams
from kvrelay import Client, _wire
from kvrelay._request import build_generate, build_tokenize
from kvrelay.v1 import router_pb2

USER = {"role": "user", "content": "hi"}


def built(prompt: str | None = None, **options: Any) -> router_pb2.GenerateRequest:
    return build_generate(prompt, options, 120.0).message  # type: ignore[arg-type]


def sampling_of(**options: Any) -> SamplingParams:
    return _wire.sampling_from_proto(built("x", **options).sampling)


@pytest.fixture(scope="module")
def router() -> Iterator[FakeRouter]:
    with running_fake_router() as router:
        yield router


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "messages"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt": b"a"}, "prompt"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**32]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": b"abcd"}, "prompt_token_ids"),
        ({"prompt_token_ids": 7}, "prompt_token_ids"),
        ({"messages": "hi"}, "messages"),
        ({"messages": USER}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"prompt": "a", "temperature": math.nan}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "priority": 9}, "priority"),
        ({"prompt": "a", "priority": -9}, "priority"),
        ({"prompt": "a", "priority": 0.5}, "priority"),
        ({"prompt": "a", "priority": True}, "priority"),
        ({"prompt": "a", "top_p": 0.0}, "top_p"),
        ({"prompt": "a", "top_p": True}, "top_p"),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": None}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2**32}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 300}, "min_tokens"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stop": [5]}, "stop"),
        ({"prompt": "a", "stop": ""}, "stop"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids"),
        ({"prompt": "a", "stop_token_ids": ["5"]}, "stop_token_ids"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
        ({"prompt": "a", "min_p": "0.1"}, "min_p"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": "5"}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [5]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {5: True}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [(5, 1.0), (5, 2.0)]}, "logit_bias"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
        ({"prompt": "a", "sampling": {"top_k": 1}}, "sampling"),
        ({"prompt": "a", "timeout_s": 0}, "timeout_s"),
        ({"prompt": "a", "timeout_s": -1.0}, "timeout_s"),
        ({"prompt": "a", "timeout_s": math.inf}, "timeout_s"),
        ({"prompt": "a", "timeout_s": "1"}, "timeout_s"),
        ({"prompt": "a", "request_id": 5}, "request_id"),
        ({"prompt": "a", "model": None}, "model"),
        ({"prompt": "a", "temprature": 0.5}, "temprature"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_sent(
    router: FakeRouter, arguments: dict[str, Any], field: str
) -> None:
    with Client(router.address) as client:
        for call in (client.generate, client.stream):
            with pytest.raises(RequestError) as caught:
                call(**arguments)
            assert caught.value.field == field
    assert router.requests == []


def test_a_misspelt_option_gets_a_suggestion() -> None:
    with pytest.raises(RequestError, match="did you mean temperature"):
        built("x", temprature=0.5)


def test_each_kind_of_input_is_sent_as_it_is() -> None:
    assert built("Grüße").prompt == "Grüße".encode()
    assert built(prompt_token_ids=[1, 70_000]).prompt_token_ids == pack_tokens([1, 70_000])
    chat = built(messages=[USER, {"role": "assistant", "content": "ja"}]).chat
    assert [(m.role, m.content) for m in chat.messages] == [("user", "hi"), ("assistant", "ja")]


def test_an_empty_input_is_left_to_the_router_which_knows_the_limits() -> None:
    assert built("").WhichOneof("input") == "prompt"
    assert built(prompt_token_ids=[]).WhichOneof("input") == "prompt_token_ids"
    assert built(messages=[]).WhichOneof("input") == "chat"


def test_sampling_options_stand_alone_or_replace_fields_of_sampling() -> None:
    base = SamplingParams(temperature=0.5, seed=1, max_tokens=9)
    assert sampling_of() == SamplingParams()
    assert sampling_of(sampling=base) == base
    assert sampling_of(sampling=base, seed=2) == SamplingParams(temperature=0.5, seed=2, max_tokens=9)
    assert sampling_of(temperature=1, stop="\n", stop_token_ids=[3], seed=None) == SamplingParams(
        temperature=1.0, stop=("\n",), stop_token_ids=(3,)
    )


def test_biases_are_a_dict_or_pairs() -> None:
    expected = SamplingParams(logit_bias=((3, 1.0), (7, -2.5)))
    assert sampling_of(logit_bias={7: -2.5, 3: 1}) == sampling_of(logit_bias=[(7, -2.5), (3, 1)]) == expected


def test_a_request_keeps_its_id_model_and_deadline() -> None:
    call = build_generate("x", {"request_id": "r", "model": "m", "timeout_s": 2}, 120.0)
    assert (call.message.request_id, call.message.model, call.timeout_s) == ("r", "m", 2.0)
    assert build_generate("x", {"timeout_s": None}, 120.0).timeout_s == 120.0


def test_tokenize_takes_text_or_messages_and_not_both() -> None:
    assert build_tokenize("x", None, "").prompt == b"x"
    assert build_tokenize(None, [USER], "").chat.messages[0].content == "hi"
    with pytest.raises(RequestError, match="nothing to work on"):
        build_tokenize(None, None, "")
    with pytest.raises(RequestError, match="only one input"):
        build_tokenize("x", [USER], "")


def test_a_priority_that_was_not_given_is_not_sent_and_zero_is() -> None:
    assert not built("x").HasField("priority")
    assert built("x", priority=0).HasField("priority")
    assert built("x", priority=-8).priority == -8
