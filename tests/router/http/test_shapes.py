from __future__ import annotations

import json

import pytest

from kvrelay.v1 import router_pb2
from router.http.generation import Api, GenerationCall
from router.http.shapes import Answer
from router.served_model import ServedModel


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("text", ["one", 'a "quoted" \\ one', "\0", "\u2028\n\U0001f600", '","logprobs":1'])
def test_a_chunk_that_is_made_around_its_text_is_that_of_the_first_text(
    model: ServedModel, api: Api, text: str
) -> None:
    call = GenerationCall(
        api=api,
        messages=(router_pb2.GenerateRequest(n=2), router_pb2.GenerateRequest(n=2)),
        timeout_s=None,
        stream=True,
        include_usage=True,
        logprobs=False,
    )
    answer = Answer(call, model.tokenizer, "r", "m", 7)
    answer.piece(1, router_pb2.Tokens(text="first", choice=1))

    chunk = json.loads(answer.piece(1, router_pb2.Tokens(text=text, choice=1)) or "")

    closing = answer.closing(1, router_pb2.Finished(text=text, choice=1))
    closing["choices"][0]["finish_reason"] = None
    assert chunk == closing
