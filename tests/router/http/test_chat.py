"""/v1/chat/completions: every answer and every chunk is what OpenAI's schema says."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import expected_output
from http_front import HttpFront
from openai_schemas import check

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
RENDERED = b"system: Be brief.\nuser: Hi\nassistant: "
CHUNK = "CreateChatCompletionStreamResponse"


def text_of(n: int) -> str:
    return bytes(expected_output(RENDERED, n)).decode()


async def test_an_answer_has_a_message_for_each_choice(front: HttpFront) -> None:
    await front.start()
    answer = await front.ok(PATH, model="fake", messages=MESSAGES, max_completion_tokens=5, n=2)
    check("CreateChatCompletionResponse", answer)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [text_of(5)] * 2
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(RENDERED), 10)


async def test_a_stream_opens_each_choice_with_the_role_and_closes_it_with_a_reason(front: HttpFront) -> None:
    await front.start()
    events = await front.stream(PATH, messages=MESSAGES, max_tokens=5, n=2, stream_options={"include_usage": True})
    for chunk in events.chunks:
        check(CHUNK, chunk)
    *chunks, usage = events.chunks
    for index in range(2):
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert deltas[-1] == {}
        assert all(set(delta) == {"content"} for delta in deltas[1:-1])
        assert events.text(index) == text_of(5)
        assert events.reasons(index) == ["length"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], len(RENDERED) + 10)
    assert events.done


async def test_the_first_token_is_sent_before_the_hand_over(front: HttpFront) -> None:
    await front.start()
    front.decode.hold("handed_over")
    async with front.open_stream(PATH, messages=MESSAGES, max_tokens=5) as response:
        first = (await response.content.readuntil(b"\n\n")) + (await response.content.readuntil(b"\n\n"))
        assert f'"content":"{text_of(1)}"'.encode() in first
        front.decode.release("handed_over")
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_come_one_a_token_with_their_bytes(front: HttpFront, stream: bool) -> None:
    await front.start()
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    if stream:
        events = await front.stream(PATH, **body)
        for chunk in events.chunks:
            check(CHUNK, chunk)
        parts = [choice["logprobs"] for chunk in events.chunks for choice in chunk["choices"] if choice["logprobs"]]
        content = [entry for part in parts for entry in part["content"]]
    else:
        answer = await front.ok(PATH, **body)
        check("CreateChatCompletionResponse", answer)
        content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(text_of(3))
    assert [bytes(entry["bytes"]).decode() for entry in content] == list(text_of(3))
    assert [entry["logprob"] for entry in content] == [0.0, -1.0, -2.0]
    assert (await front.decode.got("reserve")).reserve.sampling.logprobs == 2


async def test_content_may_come_in_parts_and_developers_speak_as_the_system(front: HttpFront) -> None:
    await front.start()
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    messages = [{"role": "developer", "content": parts}, {"role": "user", "content": "Hi"}]
    answer = await front.ok(PATH, messages=messages, max_tokens=4)
    assert answer["choices"][0]["message"]["content"] == text_of(4)


async def test_a_chat_without_a_limit_may_fill_the_context(front: HttpFront) -> None:
    await front.start()
    await front.ok(PATH, messages=MESSAGES)
    assert (await front.decode.got("reserve")).reserve.sampling.max_tokens == 200 - len(RENDERED)
