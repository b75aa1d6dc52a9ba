"""The bodies of /v1/completions and /v1/chat/completions to messages for `FrontDoor.generate`.

Unknown fields are ignored, as OpenAI-compatible servers do. Fields that are known and not supported are refused by
name unless they ask for nothing: who sets them shall not get an answer that ignores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import RequestError
from engine.sampling_params import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_SEED
from kvrelay import _request
from kvrelay._request import GenerateOptions
from kvrelay.v1 import router_pb2
from router.http.bodies import Fields, kind_of
from router.validate import MAX_CHAT_MESSAGES

MAX_PROMPTS = 64
"""In one call of /v1/completions."""
MAX_TEXT_PARTS = MAX_CHAT_MESSAGES
"""Of all messages of a chat."""
_MAX_DIGITS = 10
"""Of a token id, a u32."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's. A chat without a limit takes what fits."""

Api = Literal["chat", "completions"]

_COMMON_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    # What names a peer, a block or a scope: these follow from who calls and from what the workers hold.
    "kv_transfer_params": (),
    "cache_salt": (),
}
_NEUTRAL: dict[Api, dict[str, tuple[Any, ...]]] = {
    "chat": _COMMON_NEUTRAL
    | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "moderation": (),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
    },
    "completions": _COMMON_NEUTRAL | {"echo": (False,), "suffix": ("",), "best_of": (1,)},
}
"""Fields that are not supported, each with the values that ask for nothing; null always does."""
_ROLES = {"developer": "system"}
_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
"""Fields of `SamplingParams` that have its name here too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCall:
    """One HTTP request for text."""

    api: Api
    messages: tuple[router_pb2.GenerateRequest, ...]
    """One a prompt, at least one; all alike but for the prompt."""
    timeout_s: float | None
    stream: bool
    include_usage: bool
    """Of a stream."""
    logprobs: bool

    @property
    def n(self) -> int:
        return self.messages[0].n


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What one call may ask for. Checked before anything is made of the call."""

    max_model_len: int
    max_n: int
    """Outputs of one prompt."""
    max_requests: int
    """Prompts: each takes one of the router's places."""
    max_outputs: int | None
    """Of all prompts, what the tenant may have at once; None: as many as the other two allow."""

    def check(self, num_prompts: int, n: int) -> None:
        """Raises `RequestError` for what can never be let in, however long the client waits."""
        if not 1 <= n <= self.max_n:
            raise RequestError("n", f"must be in [1, {self.max_n}], got {kind_of(n)}")
        if num_prompts > self.max_requests:
            raise RequestError("prompt", f"at most {self.max_requests} at once (max_live_requests), got {num_prompts}")
        if self.max_outputs is not None and num_prompts * n > self.max_outputs:
            raise RequestError(
                "n" if num_prompts == 1 else "prompt",
                f"prompts times n may be at most {self.max_outputs} (the tenant's max_concurrent_requests), "
                f"got {num_prompts} * {n}",
            )


def read_completions(body: Fields, request_id: str, timeout_s: float | None, limits: CallLimits) -> GenerationCall:
    """Raises `RequestError` in our names of the fields; `names_of` has OpenAI's."""
    n = _n(body, limits)
    _refuse_unsupported(body, "completions")
    logprobs = body.integer("logprobs")
    max_tokens = body.integer("max_tokens")
    options: dict[str, Any] = _sampling(body) | {
        "max_tokens": DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        "logprobs": logprobs,
    }
    prompts = _prompts(body, limits.max_model_len)
    limits.check(len(prompts), n)
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{number}" for number in range(len(prompts))]
    messages = [_message(body, options | prompt | {"n": n}, each) for prompt, each in zip(prompts, ids, strict=True)]
    return _call(body, "completions", messages, timeout_s, logprobs is not None)


def read_chat(body: Fields, request_id: str, timeout_s: float | None, limits: CallLimits) -> GenerationCall:
    """Raises `RequestError` in our names of the fields; `names_of` has OpenAI's."""
    n = _n(body, limits)
    _refuse_unsupported(body, "chat")
    max_tokens = body.integer("max_completion_tokens")
    if max_tokens is None:
        max_tokens = body.integer("max_tokens")
    logprobs, top_logprobs = body.flag("logprobs"), body.integer("top_logprobs")
    if top_logprobs is not None and not logprobs:
        raise RequestError("top_logprobs", "needs logprobs to be true")
    if not 0 <= (top_logprobs or 0) <= MAX_LOGPROBS:
        raise RequestError("top_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {kind_of(top_logprobs)}")
    options: dict[str, Any] = _sampling(body) | {
        "messages": read_messages(body),
        "n": n,
        "max_tokens": limits.max_model_len if max_tokens is None else max_tokens,
        "logprobs": (top_logprobs or 0) if logprobs else None,
    }
    message = _message(body, options, request_id)
    message.clamp_max_tokens = max_tokens is None
    return _call(body, "chat", [message], timeout_s, logprobs)


def names_of(api: Api, body: Fields) -> Mapping[str, str]:
    """OpenAI's names of our fields."""
    if api == "completions":
        return {"prompt_token_ids": "prompt"}
    longest = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return {"max_tokens": longest, "prompt": "messages"}


def _call(
    body: Fields, api: Api, messages: list[router_pb2.GenerateRequest], timeout_s: float | None, logprobs: bool
) -> GenerationCall:
    stream = body.flag("stream")
    options = body.nested("stream_options")
    if options is not None and not stream:
        raise RequestError("stream_options", "needs stream to be true")
    return GenerationCall(
        api=api,
        messages=tuple(messages),
        timeout_s=timeout_s,
        stream=stream,
        include_usage=options is not None and options.flag("include_usage"),
        logprobs=logprobs,
    )


def _message(body: Fields, options: Mapping[str, Any], request_id: str) -> router_pb2.GenerateRequest:
    prompt = options.get("prompt")
    named = {name: value for name, value in options.items() if name != "prompt"}
    named |= {"model": body.text("model"), "request_id": request_id, "priority": body.integer("priority")}
    given = GenerateOptions(**named)  # type: ignore[typeddict-item]
    return _request.build_generate(prompt, given, _request.DEFAULT_TIMEOUT_S).message


def _sampling(body: Fields) -> dict[str, Any]:
    """The fields that are given; `SamplingParams` has the defaults, which are OpenAI's, and checks their ranges."""
    given = {name: body.get(name) for name in _PASSED_ON if body.get(name) is not None}
    if (biases := body.get("logit_bias")) is not None:
        given["logit_bias"] = _biases(biases)
    seed = body.integer("seed")
    if seed is not None:
        if not -(MAX_SEED // 2) - 1 <= seed <= MAX_SEED:
            raise RequestError("seed", f"must be an integer of 64 bits, got {kind_of(seed)}")
        given["seed"] = seed % (MAX_SEED + 1)  # OpenAI's seeds are signed
    return given


def _biases(biases: Any) -> dict[int, Any]:
    """OpenAI's have the token ids as strings, which JSON's names are."""
    if not isinstance(biases, dict):
        raise RequestError("logit_bias", f"must be an object, got {kind_of(biases)}")
    if len(biases) > MAX_BIASED_TOKENS:
        raise RequestError("logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, got {len(biases)}")
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) <= _MAX_DIGITS):
            raise RequestError("logit_bias", f"each name must be a token id, got {kind_of(name)}")
    return {int(name): bias for name, bias in biases.items()}


def _n(body: Fields, limits: CallLimits) -> int:
    n = body.integer("n")
    n = 1 if n is None else n
    limits.check(1, n)
    return n


def _prompts(body: Fields, max_model_len: int) -> list[dict[str, Any]]:
    """As options of `build_generate`, one a prompt."""
    prompt = body.get("prompt")
    match prompt:
        case str():
            return [{"prompt": prompt}]
        case [int(), *_] if not isinstance(prompt[0], bool):
            return [{"prompt_token_ids": _fitting("prompt", prompt, max_model_len)}]
        case [str() | list(), *_]:
            if len(prompt) > MAX_PROMPTS:
                raise RequestError("prompt", f"at most {MAX_PROMPTS} prompts in one call, got {len(prompt)}")
            kind = type(prompt[0])
            return [_one_of_several(number, entry, kind, max_model_len) for number, entry in enumerate(prompt)]
        case _:
            got = "an empty list" if prompt == [] else kind_of(prompt)
            raise RequestError(
                "prompt", f"must be a string, a list of strings or of token ids, or of such lists: {got}"
            )


def _one_of_several(number: int, entry: Any, kind: type, max_model_len: int) -> dict[str, Any]:
    where = f"prompt[{number}]"
    if not isinstance(entry, kind):
        raise RequestError(where, f"must be of the kind of the first prompt, got {kind_of(entry)}")
    return {"prompt": entry} if kind is str else {"prompt_token_ids": _fitting(where, entry, max_model_len)}


def _fitting(field: str, token_ids: Any, max_model_len: int) -> Any:
    """`token_ids`, if so many can be served; looks at none of them."""
    if len(token_ids) >= max_model_len:
        raise RequestError(field, f"at most {max_model_len - 1} tokens, got {len(token_ids)}")
    return token_ids


def read_messages(body: Fields) -> list[dict[str, str]]:
    """A conversation, as `kvrelay` takes it."""
    messages, num_parts = [], 0
    for message in body.nested_list("messages", MAX_CHAT_MESSAGES):
        role = message.text("role")
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):
                raise RequestError(message.name_of(name), "is not supported")
        content = message.get("content")
        if isinstance(content, list):
            num_parts += len(content)
            if num_parts > MAX_TEXT_PARTS:
                raise RequestError("messages", f"at most {MAX_TEXT_PARTS} text parts, got {num_parts} or more")
        messages.append({"role": _ROLES.get(role, role), "content": _content(message)})
    return messages


def _content(message: Fields) -> str:
    """A text, or the texts of its parts one after the other."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            message.name_of("content"), f"must be a string or a list of text parts, got {kind_of(content)}"
        )
    texts = []
    for part in message.nested_list("content", MAX_TEXT_PARTS):
        if part.get("type") != "text":
            raise RequestError(part.name_of("type"), f"must be 'text', got {kind_of(part.get('type'))}")
        texts.append(part.text("text"))
    return "".join(texts)


def _refuse_unsupported(body: Fields, api: Api) -> None:
    for name, neutral in _NEUTRAL[api].items():
        value = body.get(name)
        if name == "best_of" and value == body.get("n"):
            continue
        if value is not None and value not in neutral:
            raise RequestError(name, f"is not supported, got {kind_of(value)}")
