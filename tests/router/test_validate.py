from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.block_hash import pack_tokens, unpack_tokens
from engine.errors import RequestError
from engine.tokenizer import ChatMessage, Tokenizer
from kvrelay.v1 import common_pb2, router_pb2
from router.request import GenerationRequest
from router.served_model import ServedModel
from router.validate import (
    MAX_ECHO_CHARS,
    check_input,
    check_model,
    complete,
    draw_seed,
    read_params,
    request_id_of,
    tokenize,
)

NAN = float("nan")
MAX_BYTES = 400


def read_request(
    message: router_pb2.GenerateRequest, model: ServedModel, seed: Callable[[], int] = draw_seed
) -> GenerationRequest:
    """As the dispatcher does it, where it does it."""
    params = read_params(message, model, seed)
    return complete("r", prompt_tokens(message, model), params, model)


def prompt_tokens(message: router_pb2.GenerateRequest, model: ServedModel) -> bytes:
    check_input(message, model, MAX_BYTES)
    if message.HasField("prompt_token_ids"):
        return message.prompt_token_ids
    return tokenize(message, model.tokenizer, model.max_model_len)


def message(**fields: Any) -> router_pb2.GenerateRequest:
    if not {"prompt", "prompt_token_ids", "chat"} & fields.keys():
        fields["prompt"] = b"hi"
    return router_pb2.GenerateRequest(**fields)


def sampling(**fields: Any) -> router_pb2.GenerateRequest:
    return message(sampling=common_pb2.SamplingParams(**fields))


def chat(*messages: tuple[str, str]) -> router_pb2.GenerateRequest:
    pairs = [router_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    return message(chat=router_pb2.ChatMessages(messages=pairs))


BAD = [
    (router_pb2.GenerateRequest(), "prompt", "one of"),
    (message(prompt=b""), "prompt", "must not be empty"),
    (message(prompt=b"ok \xff"), "prompt", "UTF-8.*byte 3"),
    (message(prompt=b"x" * 200), "prompt", "at most 199 tokens.*got 200"),
    (message(prompt=b"x" * 100, sampling=common_pb2.SamplingParams(max_tokens=101)), "max_tokens", "200.*100 \\+ 101"),
    (message(prompt=b"x" * 401), "prompt", "at most 400 bytes of text.*got 401"),
    (chat(("user", "x" * 300), ("user", "é" * 51)), "messages", "at most 400 bytes of text.*got 402"),
    (message(prompt_token_ids=pack_tokens([1] * 200)), "prompt_token_ids", "at most 199 tokens.*got 200"),
    (message(model="other"), "model", "'other'.*'fake'"),
    (message(prompt_token_ids=b""), "prompt_token_ids", "at least one"),
    (message(prompt_token_ids=b"123"), "prompt_token_ids", "4 bytes"),
    (message(prompt_token_ids=pack_tokens([1, 257])), "prompt_token_ids", "below the vocabulary's 257, got 257"),
    (chat(), "messages", "at least one"),
    (chat(("", "hi")), "messages[0].role", "is missing"),
    (chat(("user", "hi"), ("robot", "hi")), "messages[1].role", "one of system, user, assistant, got 'robot'"),
    (sampling(temperature=-0.1), "temperature", ">= 0"),
    (sampling(temperature=NAN), "temperature", "finite"),
    (sampling(temperature=float("inf")), "temperature", "finite"),
    (sampling(top_p=NAN), "top_p", "(0, 1]"),
    (sampling(top_p=-1.0), "top_p", "(0, 1]"),
    (sampling(top_p=0.0), "top_p", "(0, 1]"),
    (sampling(max_tokens=0), "max_tokens", "at least 1"),
    (sampling(min_tokens=9, max_tokens=8), "min_tokens", "max_tokens=8"),
    (sampling(logprobs=21), "logprobs", "20"),
    (sampling(stop=[""]), "stop", "1 to 256"),
    (sampling(stop_token_ids=[300], max_tokens=4), "stop_token_ids", "257, got 300"),
    (sampling(logit_bias={300: 1.0}, max_tokens=4), "logit_bias", "257, got 300"),
]


@pytest.mark.parametrize(
    ("request_", "field", "pattern"), BAD, ids=[f"{n}-{field}" for n, (_, field, _) in enumerate(BAD)]
)
def test_bad_input_names_field_and_limit(
    model: ServedModel, request_: router_pb2.GenerateRequest, field: str, pattern: str
) -> None:
    pattern = pattern.replace("(0, 1]", "\\(0, 1\\]")
    with pytest.raises(RequestError, match=pattern) as raised:
        read_request(request_, model)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("request_id", "pattern"),
    [("x" * 129, "at most 128 characters, got 129"), ("a\nb", "printable"), ("ü", "printable ASCII")],
)
def test_a_bad_request_id_is_refused(request_id: str, pattern: str) -> None:
    with pytest.raises(RequestError, match=pattern) as raised:
        request_id_of(message(request_id=request_id))
    assert raised.value.field == "request_id"


def test_a_missing_request_id_is_made_up() -> None:
    assert request_id_of(message(request_id="mine")) == "mine"
    first, second = request_id_of(message()), request_id_of(message())
    assert first
    assert first != second


def test_the_seed_and_every_default_are_filled_in(model: ServedModel) -> None:
    request = read_request(sampling(max_tokens=5), model, seed=lambda: 99)
    assert request.params.seed == 99
    assert request.sampling.seed == 99
    assert request.sampling.HasField("temperature")
    assert request.max_total_tokens == 7


def test_a_given_seed_stays(model: ServedModel) -> None:
    assert read_request(sampling(seed=0, max_tokens=5), model).params.seed == 0


def test_a_prompt_that_fits_exactly_passes(model: ServedModel) -> None:
    fits = message(prompt=b"x" * 199, sampling=common_pb2.SamplingParams(max_tokens=1))
    assert read_request(fits, model).max_total_tokens == 200


def test_a_chat_is_rendered_with_the_template(model: ServedModel) -> None:
    request = chat(("system", "Be brief."), ("user", "Hi"))
    tokens = bytes(unpack_tokens(prompt_tokens(request, model)))
    assert tokens == b"system: Be brief.\nuser: Hi\nassistant: "


def test_token_ids_are_taken_as_they_are(model: ServedModel) -> None:
    data = pack_tokens([256, 0, 65])
    assert prompt_tokens(message(prompt_token_ids=data), model) == data


class NoTokenizer(Tokenizer):
    """Knows how few tokens a text can have, and must not be asked for more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def fewest_tokens(self, text: bytes) -> int:
        return self._tokenizer.fewest_tokens(text)

    def render_chat(self, messages: Sequence[ChatMessage], add_generation_prompt: bool = True) -> str:
        return self._tokenizer.render_chat(messages, add_generation_prompt)


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_that_can_never_fit_is_refused_without_tokenizing_it(model: ServedModel, field: str) -> None:
    text = "x" * 1001  # the longest entry, <eos>, has 5 bytes
    request: router_pb2.GenerateRequest | router_pb2.TokenizeRequest = router_pb2.TokenizeRequest(prompt=text.encode())
    if field == "messages":
        request = chat(("user", text))
    unused = NoTokenizer(model.tokenizer)

    def check() -> None:
        check_input(request, replace(model, tokenizer=unused), 10_000)
        tokenize(request, unused, model.max_model_len)

    with pytest.raises(RequestError, match=r"at most 199 tokens.*are 20[1-9] or more") as raised:
        check()
    assert raised.value.field == field


def test_a_client_gets_no_more_than_the_beginning_of_its_own_text_back(model: ServedModel) -> None:
    long = "ü" * 100_000
    calls: list[Callable[[], object]] = [
        lambda: check_model(long, model),
        lambda: request_id_of(message(request_id=long[:128])),
        lambda: check_input(chat((long, "hi")), model, MAX_BYTES),
    ]
    for call in calls:
        with pytest.raises(RequestError) as raised:
            call()
        assert str(raised.value).count("ü") <= MAX_ECHO_CHARS
