"""Drives a router with the real `openai` client, whichever version this interpreter finds; prints what it saw as JSON.

python openai_script.py BASE_URL API_KEY
"""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


def main(base_url: str, api_key: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=20) as client:
        return {
            "version": openai.__version__,
            "models": [model.id for model in client.models.list()],
            "completion": completion(client),
            "completion_stream": completion_stream(client),
            "chat": chat(client),
            "chat_stream": chat_stream(client),
            "errors": errors(client),
            "wrong_key": wrong_key(base_url),
        }


def completion(client: openai.OpenAI) -> dict[str, Any]:
    answer = client.completions.create(model="fake", prompt=["Hi", "Ho"], max_tokens=4, n=2, seed=3, logprobs=1)
    assert answer.usage is not None
    return {
        "texts": [choice.text for choice in answer.choices],
        "reasons": [choice.finish_reason for choice in answer.choices],
        "tokens": answer.choices[0].logprobs.tokens if answer.choices[0].logprobs else None,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "request_id": answer._request_id,
    }


def completion_stream(client: openai.OpenAI) -> str:
    stream = client.completions.create(model="fake", prompt="Hi", max_tokens=4, stream=True)
    return "".join(chunk.choices[0].text for chunk in stream)


def chat(client: openai.OpenAI) -> dict[str, Any]:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=4, n=2, logprobs=True, top_logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return {
        "texts": [choice.message.content for choice in answer.choices],
        "tokens": [entry.token for entry in logprobs.content],
    }


def chat_stream(client: openai.OpenAI) -> dict[str, Any]:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
    )
    text, roles, reasons, usage = "", [], [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert usage is not None
    return {"text": text, "roles": roles, "reasons": reasons, "usage": [usage.prompt_tokens, usage.completion_tokens]}


def errors(client: openai.OpenAI) -> dict[str, Any]:
    """Class, status, code and param, by what was done."""
    seen: dict[str, Any] = {}
    calls: dict[str, dict[str, Any]] = {
        "bad temperature": {"temperature": -1},
        "unknown model": {"model": "gpt-4"},
        "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "too many outputs": {"n": 9},
    }
    for name, fields in calls.items():
        try:
            client.chat.completions.create(**{"model": "fake", "messages": MESSAGES, "max_tokens": 4} | fields)
        except openai.APIStatusError as error:
            seen[name] = [type(error).__name__, error.status_code, error.code, error.param]
    try:  # the test has told the worker to fail any output of 7 tokens at the sixth
        for _ in client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=7, stream=True):
            pass
    except openai.APIError as error:
        seen["fault in a stream"] = [type(error).__name__, error.message]
    return seen


def wrong_key(base_url: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0, timeout=20) as client:
        try:
            client.models.list()
        except openai.AuthenticationError as error:
            return str(error.code)
    return "was let in"


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
