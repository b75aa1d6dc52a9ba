"""Client messages to validated requests. Every refusal is a `RequestError` that names the field and the limit."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from engine.block_hash import TOKEN_BYTES, pack_tokens, unpack_tokens
from engine.errors import RequestError
from engine.sampling_params import SamplingParams
from engine.tokenizer import ChatMessage, Tokenizer
from kvrelay._wire import later_fields, sampling_from_proto, sampling_to_proto
from kvrelay.v1 import router_pb2
from router.request import GenerationRequest
from router.served_model import ServedModel
from router.tenants import Tenant

MAX_REQUEST_ID_CHARS = 128
MAX_CHAT_MESSAGES = 4096
MAX_ECHO_CHARS = 80
ROLES = ("system", "user", "assistant")
Input: TypeAlias = router_pb2.GenerateRequest | router_pb2.TokenizeRequest


def shortened(text: str) -> str:
    """A client's text for a message to that client."""
    return repr(text) if len(text) <= MAX_ECHO_CHARS else f"{text[:MAX_ECHO_CHARS]!r}..."


def draw_seed() -> int:
    return secrets.randbits(64)


def request_id_of(message: router_pb2.GenerateRequest) -> str:
    """The client's id, or a new one."""
    request_id: str = message.request_id
    if not request_id:
        return uuid.uuid4().hex
    check_request_id(request_id)
    return request_id


def check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        raise RequestError("request_id", f"at most {MAX_REQUEST_ID_CHARS} characters, got {len(request_id)}")
    if not (request_id.isascii() and request_id.isprintable()):
        raise RequestError("request_id", f"must be printable ASCII, got {shortened(request_id)}")


def check_n(message: router_pb2.GenerateRequest, limit: int) -> None:
    if message.n > limit:
        raise RequestError("n", f"at most {limit} choices, got {message.n}")


def priority_of(message: router_pb2.GenerateRequest, tenant: Tenant) -> int:
    """The one that the client asks for, if its tenant may have it, or the tenant's."""
    if not message.HasField("priority"):
        return tenant.priority
    tenant.check_priority(message.priority)
    return message.priority


def read_params(
    message: router_pb2.GenerateRequest, model: ServedModel, seed: Callable[[], int] = draw_seed
) -> SamplingParams:
    """Check everything but the input, and fill in the seed."""
    check_model(message.model, model)
    params = sampling_from_proto(message.sampling)
    check_token_ids("stop_token_ids", params.stop_token_ids, model)
    check_token_ids("logit_bias", [token_id for token_id, _ in params.logit_bias], model)
    return params if params.seed is not None else replace(params, seed=seed())


def clamped(params: SamplingParams, prompt: bytes, limit: int) -> SamplingParams:
    """`params` with at most as many `max_tokens` as fit beside `prompt` into `limit` tokens, and at least one."""
    room = limit - len(prompt) // TOKEN_BYTES
    return replace(params, max_tokens=max(1, min(params.max_tokens, room)))


def complete(
    request_id: str,
    prompt: bytes,
    params: SamplingParams,
    model: ServedModel,
    scope: bytes = b"",
    priority: int = 0,
) -> GenerationRequest:
    """The request from its checked parts. Raises `RequestError` if it is longer than the model takes."""
    request = GenerationRequest(
        request_id=request_id,
        prompt=prompt,
        params=params,
        sampling=sampling_to_proto(params),
        scope=scope,
        priority=priority,
        num_public_tokens=model.public_prefixes.num_leading(prompt),
        later_fields=later_fields(params),
    )
    check_length(request, model.max_model_len)
    return request


def check_model(name: str, model: ServedModel) -> None:
    if name not in ("", model.name):
        raise RequestError("model", f"unknown model {shortened(name)}; this router serves {model.name!r}")


def check_input(message: Input, model: ServedModel, max_prompt_bytes: int) -> None:
    """Refuse what can be refused without tokenizing it. Takes a few milliseconds, whatever the message."""
    kind = message.WhichOneof("input")
    if kind == "prompt":
        if not message.prompt:
            raise RequestError("prompt", "must not be empty")
        _check_bytes("prompt", len(message.prompt), max_prompt_bytes)
        _check_fewest("prompt", message.prompt, model.tokenizer, model.max_model_len)
    elif kind == "chat":
        _check_chat(message.chat, max_prompt_bytes)
    elif kind == "prompt_token_ids" and isinstance(message, router_pb2.GenerateRequest):
        if len(message.prompt_token_ids) >= model.max_model_len * TOKEN_BYTES:
            num_tokens = len(message.prompt_token_ids) // TOKEN_BYTES
            raise RequestError("prompt_token_ids", _too_many_tokens(model.max_model_len, f"got {num_tokens}"))
        check_token_ids("prompt_token_ids", unpack_tokens(message.prompt_token_ids), model)
        _some(message.prompt_token_ids, "prompt_token_ids")
    else:
        raise RequestError("prompt", "one of prompt, prompt_token_ids and chat is needed, got none")


def tokenize(message: Input, tokenizer: Tokenizer, max_model_len: int) -> bytes:
    """Token ids of a text or chat that passed `check_input`, little-endian u32; at least one.

    Takes seconds for the longest, and keeps the interpreter's lock all the while.
    """
    if message.HasField("chat"):
        text = tokenizer.render_chat([ChatMessage(chat.role, chat.content) for chat in message.chat.messages])
        _check_fewest("messages", text.encode(), tokenizer, max_model_len)
        return _some(pack_tokens(tokenizer.encode_rendered(text)), "messages")
    try:
        text = message.prompt.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("prompt", f"must be UTF-8: {error.reason} at byte {error.start}") from None
    return _some(pack_tokens(tokenizer.encode(text)), "prompt")


def check_length(request: GenerationRequest, limit: int, why: str = "") -> None:
    """`limit` is in tokens, prompt and output together; `why` it is not the model's."""
    num_prompt_tokens = request.num_prompt_tokens
    because = f" ({why})" if why else ""
    if num_prompt_tokens >= limit:
        raise RequestError("prompt", _too_many_tokens(limit, f"got {num_prompt_tokens}{because}"))
    if request.max_total_tokens > limit:
        raise RequestError(
            "max_tokens",
            f"prompt and max_tokens together may be {limit} tokens; "
            f"got {num_prompt_tokens} + {request.params.max_tokens}{because}",
        )


def _check_chat(chat: router_pb2.ChatMessages, max_prompt_bytes: int) -> None:
    if not chat.messages:
        raise RequestError("messages", "must hold at least one message, got none")
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        raise RequestError("messages", f"at most {MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}")
    for position, message in enumerate(chat.messages):
        if message.role not in ROLES:
            got = f"got {shortened(message.role)}" if message.role else "is missing"
            raise RequestError(f"messages[{position}].role", f"must be one of {', '.join(ROLES)}, {got}")
    _check_bytes("messages", sum(len(message.content.encode()) for message in chat.messages), max_prompt_bytes)


def _check_bytes(field: str, num_bytes: int, limit: int) -> None:
    if num_bytes > limit:
        raise RequestError(field, f"at most {limit} bytes of text (max_prompt_bytes), got {num_bytes}")


def _check_fewest(field: str, text: bytes, tokenizer: Tokenizer, max_model_len: int) -> None:
    fewest = tokenizer.fewest_tokens(text)
    if fewest >= max_model_len:
        raise RequestError(field, _too_many_tokens(max_model_len, f"{len(text)} bytes are {fewest} or more"))


def _too_many_tokens(limit: int, got: str) -> str:
    return f"at most {limit - 1} tokens, which leaves one for the output; {got}"


def _some(tokens: bytes, field: str) -> bytes:
    if len(tokens) < TOKEN_BYTES:
        raise RequestError(field, "must have at least one token, got none")
    return tokens


def check_token_ids(field: str, token_ids: Sequence[int], model: ServedModel) -> None:
    for worst in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= worst < model.vocab_size:
            raise RequestError(field, f"each must be below the vocabulary's {model.vocab_size}, got {worst}")
