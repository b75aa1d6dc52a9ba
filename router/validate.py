"""Client messages to validated requests. Every refusal is a `RequestError` that names the field and the limit."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from engine.errors import RequestError
from engine.tokenizer import ChatMessage
from kvrelay._wire import sampling_from_proto, sampling_to_proto
from kvrelay.v1 import router_pb2
from router.request import GenerationRequest
from router.served_model import ServedModel

MAX_REQUEST_ID_CHARS = 128
MAX_CHAT_MESSAGES = 4096
ROLES = ("system", "user", "assistant")


def draw_seed() -> int:
    return secrets.randbits(64)


def request_id_of(message: router_pb2.GenerateRequest) -> str:
    """The client's id, or a new one."""
    request_id: str = message.request_id
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", f"at most {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}")
    if not (request_id.isascii() and request_id.isprintable()):
        raise RequestError("request_id", f"must be printable ASCII, got {request_id!r}")
    return request_id


def read_request(
    message: router_pb2.GenerateRequest, request_id: str, model: ServedModel, seed: Callable[[], int] = draw_seed
) -> GenerationRequest:
    """Check everything that does not depend on the workers, tokenize, fill in the seed."""
    check_model(message.model, model)
    params = sampling_from_proto(message.sampling)
    _check_token_ids("stop_token_ids", params.stop_token_ids, model)
    if params.seed is None:
        params = replace(params, seed=seed())
    prompt = prompt_tokens(message, model)
    request = GenerationRequest(request_id=request_id, prompt=prompt, params=params, sampling=sampling_to_proto(params))
    check_length(request, model.max_model_len)
    return request


def check_model(name: str, model: ServedModel) -> None:
    if name not in ("", model.name):
        raise RequestError("model", f"unknown model {name!r}; this router serves {model.name!r}")


def prompt_tokens(message: router_pb2.GenerateRequest | router_pb2.TokenizeRequest, model: ServedModel) -> bytes:
    """Token ids of the input, little-endian u32; at least one."""
    kind = message.WhichOneof("input")
    if kind == "prompt":
        return _from_text(message.prompt, model)
    if kind == "chat":
        return _from_chat(message.chat, model)
    if kind == "prompt_token_ids" and isinstance(message, router_pb2.GenerateRequest):
        return _from_token_ids(message.prompt_token_ids, model)
    raise RequestError("prompt", "one of prompt, prompt_token_ids and chat is needed, got none")


def check_length(request: GenerationRequest, limit: int) -> None:
    """`limit` is in tokens, prompt and output together."""
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens >= limit:
        raise RequestError(
            "prompt", f"at most {limit - 1} tokens, which leaves one for the output; got {num_prompt_tokens}"
        )
    if request.max_total_tokens > limit:
        raise RequestError(
            "max_tokens",
            f"prompt and max_tokens together may be {limit} tokens; "
            f"got {num_prompt_tokens} + {request.params.max_tokens}",
        )


def _from_text(prompt: bytes, model: ServedModel) -> bytes:
    if not prompt:
        raise RequestError("prompt", "must not be empty")
    try:
        text = prompt.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"must be UTF-8: {error.reason} at byte {error.start}") from None
    return _some(pack_tokens(model.tokenizer.encode(text)), "prompt")


def _from_token_ids(data: bytes, model: ServedModel) -> bytes:
    token_ids = unpack_tokens(data)
    _check_token_ids("prompt_token_ids", token_ids, model)
    return _some(data, "prompt_token_ids")


def _from_chat(chat: router_pb2.ChatMessages, model: ServedModel) -> bytes:
    if not chat.messages:
        raise RequestError("messages", "must hold at least one message, got none")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise RequestError("messages", f"at most {MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}")
    for position, message in enumerate(chat.messages):
        if not message.role:
            raise RequestError(f"messages[{position}].role", f"is missing; must be one of {', '.join(ROLES)}")
        if message.role not in ROLES:
            raise RequestError(f"messages[{position}].role", f"must be one of {', '.join(ROLES)}, got {message.role!r}")
    messages = [ChatMessage(message.role, message.content) for message in chat.messages]
    return _some(pack_tokens(model.tokenizer.encode_chat(messages)), "messages")


def _some(tokens: bytes, field: str) -> bytes:
    if len(tokens) < TOKEN_BYTES:
        raise RequestError(field, "must have at least one token, got none")
    return tokens


def _check_token_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    if token_ids and max(token_ids) >= model.vocab_size:
        raise RequestError(field, f"each must be below the vocabulary's {model.vocab_size}, got {max(token_ids)}")
