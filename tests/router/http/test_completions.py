"""/v1/completions: every answer and every chunk is what OpenAI's schema says, with the tokens of the request path."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_worker import expected_output
from http_front import HttpFront
from openai_schemas import check, check_completion_chunk

PATH = "/v1/completions"


def text_of(prompt: bytes, n: int) -> str:
    return bytes(expected_output(prompt, n)).decode()


async def test_an_answer_has_text_reason_and_usage(front: HttpFront) -> None:
    await front.start()
    front.decode.cached_tokens = 8
    answer = await front.ok(PATH, model="fake", prompt="hello world", max_tokens=5)
    check("CreateCompletionResponse", answer)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text_of(b"hello world", 5), "length")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (11, 5, 16)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", [b"hello"]),
        ([104, 105], [b"hi"]),
        (["hello", "you"], [b"hello", b"you"]),
        ([[104, 105], [97]], [b"hi", b"a"]),
    ],
)
async def test_a_prompt_may_be_text_ids_or_a_list_of_either(
    front: HttpFront, prompt: Any, prompts: list[bytes]
) -> None:
    await front.start()
    answer = await front.ok(PATH, prompt=prompt, max_tokens=4)
    assert [choice["text"] for choice in answer["choices"]] == [text_of(each, 4) for each in prompts]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_choices_are_numbered_prompt_by_prompt(front: HttpFront) -> None:
    await front.start()
    answer = await front.ok(PATH, prompt=["hello", "you"], n=2, max_tokens=3)
    check("CreateCompletionResponse", answer)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [text_of(b"hello", 3)] * 2 + [text_of(b"you", 3)] * 2
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (8, 12)


async def test_a_stream_says_what_the_whole_answer_says(front: HttpFront) -> None:
    await front.start()
    body: dict[str, Any] = {"prompt": ["hello", "you"], "n": 2, "max_tokens": 6}
    whole = await front.ok(PATH, **body)
    events = await front.stream(PATH, **body)
    for chunk in events.chunks:
        check_completion_chunk(chunk)
    assert [events.text(index) for index in range(4)] == [choice["text"] for choice in whole["choices"]]
    assert [events.reasons(index) for index in range(4)] == [["length"]] * 4
    assert (events.done, events.errors) == (True, [])
    assert len({(chunk["id"], chunk["created"]) for chunk in events.chunks}) == 1


async def test_usage_comes_in_the_last_chunk_of_a_stream_that_asks_for_it(front: HttpFront) -> None:
    await front.start()
    events = await front.stream(PATH, prompt=["hello", "you"], max_tokens=3, stream_options={"include_usage": True})
    *others, last = events.chunks
    check_completion_chunk(last)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (8, 6)
    assert all(chunk["usage"] is None for chunk in others)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_one_a_token_with_their_place_in_the_text(front: HttpFront, stream: bool) -> None:
    await front.start()
    body: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, "logprobs": 1}
    if stream:
        events = await front.stream(PATH, **body)
        for chunk in events.chunks:
            check_completion_chunk(chunk)
        parts = [choice["logprobs"] for chunk in events.chunks for choice in chunk["choices"] if choice["logprobs"]]
        logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
    else:
        answer = await front.ok(PATH, **body)
        check("CreateCompletionResponse", answer)
        logprobs = answer["choices"][0]["logprobs"]
    tokens = list(text_of(b"hello", 3))
    assert logprobs["tokens"] == tokens
    assert logprobs["token_logprobs"] == [0.0, -1.0, -2.0]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["top_logprobs"] == [{token: -float(i)} for i, token in enumerate(tokens)]


async def test_a_stop_string_ends_the_text_before_it(front: HttpFront) -> None:
    await front.start()
    full = text_of(b"hello", 8)
    answer = await front.ok(PATH, prompt="hello", max_tokens=8, stop=[full[3:5]])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (full[:3], "stop")
    events = await front.stream(PATH, prompt="hello", max_tokens=8, stop=full[3:5])
    assert (events.text(), events.reasons()) == (full[:3], ["stop"])


async def test_workers_get_the_sampling_that_the_body_says(front: HttpFront) -> None:
    await front.start()
    await front.ok(PATH, prompt="hello", temperature=0.5, top_p=0.9, top_k=4, seed=-1, ignore_eos=True, user="x")
    sampling = (await front.decode.got("reserve")).reserve.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.ignore_eos) == (0.5, 0.9, 4, True)
    assert sampling.seed == 2**64 - 1
    assert sampling.max_tokens == 16


async def test_workers_get_the_changes_of_logits_that_the_body_says(front: HttpFront) -> None:
    await front.start()
    changes = {"min_p": 0.25, "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 2}
    await front.ok(PATH, prompt="hello", **changes, logit_bias={"5": -100, "256": 1.5})
    sampling = (await front.decode.got("reserve")).reserve.sampling
    assert {name: getattr(sampling, name) for name in changes} == changes
    assert dict(sampling.logit_bias) == {5: -100.0, 256: 1.5}


async def test_a_first_prompt_that_fails_ends_the_others(front: HttpFront) -> None:
    await front.start(max_live_requests=2)
    front.prefill.hold("prefill")
    first = asyncio.create_task(front.ok(PATH, prompt="x", max_tokens=3))
    await front.prefill.reached("prefill")
    status, error = await front.refused(PATH, prompt=["hello", "you"], max_tokens=3)
    front.prefill.release("prefill")
    await first
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    await front.idle()
