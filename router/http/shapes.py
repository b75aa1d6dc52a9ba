"""Answers in OpenAI's shapes: whole ones, and the chunks of streams. Knows no sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from engine.block_hash import unpack_tokens
from engine.tokenizer import Tokenizer
from kvrelay._wire import finish_reason_from_proto
from kvrelay.types import Generation, TokenLogprobs, Usage
from kvrelay.v1 import router_pb2
from router.http.generation import GenerationCall

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not; that of OpenAI."""

Json = dict[str, Any]
_NO_TEXT = "\0"
"""Stands for the text while a chunk is cut in two there: nothing else in it can be this, as ids and names print."""


json_text: Callable[[Json | str], str] = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""How streams write JSON."""


class Answer:
    """What one call's answer is made of. A choice has the index: number of the prompt * n + choice of the prompt."""

    def __init__(self, call: GenerationCall, tokenizer: Tokenizer, request_id: str, model: str, created: int) -> None:
        """`model` is the name that the client used, if it used one."""
        self._call = call
        self._tokenizer = tokenizer
        self._chat = call.api == "chat"
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._head = {"id": f"{prefix}-{request_id}", "object": kind, "created": created, "model": model}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if self._chat else {})
        self._offsets: dict[int, int] = {}
        """Of a stream of completions with logprobs: characters so far, by index."""
        self._pieces: dict[int, tuple[str, str]] = {}
        """Of a stream without logprobs, by index: what stands before and behind the text of each chunk."""

    def whole(self, generations: Sequence[Generation]) -> Json:
        """One generation a prompt, in order."""
        choices = [choice for generation in generations for choice in generation.choices]
        return self._head | {
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": _usage([[choice.usage for choice in generation.choices] for generation in generations]),
        }

    def opening(self, prompt: int, choice: int) -> Json | None:
        """The first chunk of a choice, before its first token; completions have none."""
        if not self._chat:
            return None
        return self._chunk(prompt, choice, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, prompt: int, tokens: router_pb2.Tokens) -> str | None:
        """The chunk of new tokens, as `json_text`; None if they bring neither text nor logprobs.

        A stream has hundreds of them that differ in their text alone: only that is made into JSON each time.
        """
        text, index = tokens.text, prompt * self._call.n + tokens.choice
        if self._call.logprobs:
            entries = [TokenLogprobs.from_proto(entry) for entry in tokens.logprobs]
            logprobs = self._logprobs(index, unpack_tokens(tokens.token_ids), entries)
            return json_text(self._chunk(prompt, tokens.choice, self._text(text), None, logprobs))
        if not text:
            return None
        if index not in self._pieces:
            chunk = json_text(self._chunk(prompt, tokens.choice, self._text(_NO_TEXT), None))
            before, _, behind = chunk.partition(json_text(_NO_TEXT))
            self._pieces[index] = before, behind
        before, behind = self._pieces[index]
        return f"{before}{json_text(text)}{behind}"

    def closing(self, prompt: int, finished: router_pb2.Finished) -> Json:
        """The last chunk of a choice, with the text that was held back."""
        body = self._text(finished.text) if finished.text or not self._chat else {"delta": {}}
        return self._chunk(prompt, finished.choice, body, finish_reason_from_proto(finished.reason))

    def usage(self, usages: Sequence[Sequence[Usage]]) -> Json:
        """The last chunk of a stream that was asked for it. `usages`: by prompt, then by choice."""
        return self._chunk_head | {"choices": [], "usage": _usage(usages)}

    def _choice(self, index: int, choice: Generation) -> Json:
        logprobs = self._logprobs(index, choice.token_ids, choice.logprobs) if self._call.logprobs else None
        body: Json = {"text": choice.text}
        if self._chat:
            body = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _chunk(self, prompt: int, choice: int, body: Json, reason: str | None, logprobs: Json | None = None) -> Json:
        index = prompt * self._call.n + choice
        chunk = self._chunk_head | {
            "choices": [{"index": index, **body, "logprobs": logprobs, "finish_reason": reason}]
        }
        if self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def _text(self, text: str) -> Json:
        return {"delta": {"content": text}} if self._chat else {"text": text}

    def _logprobs(self, index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> Json:
        named = [
            (self._tokenizer.token_bytes(token_id), entry.logprob, self._named_top(entry))
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]
        if self._chat:
            content = [
                _entry(token, logprob) | {"top_logprobs": [_entry(*other) for other in top]}
                for token, logprob, top in named
            ]
            return {"content": content, "refusal": None}
        tokens = [_readable(token) for token, _, _ in named]
        offsets, end = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(end)
            end += len(token)
        self._offsets[index] = end
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(logprob) for _, logprob, _ in named],
            "top_logprobs": [
                {_readable(other): _finite(value) for other, value in [*top, (token, logprob)]}
                for token, logprob, top in named
            ],
            "text_offset": offsets,
        }

    def _named_top(self, entry: TokenLogprobs) -> list[tuple[bytes, float]]:
        return [(self._tokenizer.token_bytes(top.token_id), top.logprob) for top in entry.top]


def _entry(token: bytes, logprob: float) -> Json:
    return {"token": _readable(token), "logprob": _finite(logprob), "bytes": list(token)}


def _readable(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def _usage(usages: Sequence[Sequence[Usage]]) -> Json:
    """The choices of a prompt share it: it counts once."""
    prompt_tokens = sum(choices[0].prompt_tokens for choices in usages)
    completion_tokens = sum(usage.completion_tokens for choices in usages for usage in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choices[0].cached_tokens for choices in usages)},
    }
