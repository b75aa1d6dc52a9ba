"""From the arguments of a call to the wire message: the one place for both clients. Touches no network.

Whatever is wrong with the arguments becomes a `RequestError` that names the argument.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, TypedDict

from engine.block_hash import pack_tokens, unpack_tokens
from engine.errors import ConfigError, RequestError
from engine.priority import check_priority
from engine.sampling_params import MAX_BIASED_TOKENS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams
from kvrelay import _wire
from kvrelay.types import Messages
from kvrelay.v1 import router_pb2

DEFAULT_TIMEOUT_S = 120.0
MAX_TIMEOUT_S = 24 * 3600.0
DEFAULT_WAIT_S = 300.0
"""For a cluster to be as it was ordered."""
ANSWER_MARGIN_S = 60.0
"""What the answer to an order may take beyond that."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments; a single stop string may stand alone, biases be a dict."""

    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    max_tokens: int
    logprobs: int | None
    ignore_eos: bool
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]


class GenerateOptions(SamplingOptions, total=False):
    """Everything that `generate` and `stream` take beside a plain prompt. Exactly one input must be given."""

    messages: Messages | None
    """A conversation, each message with `role` and `content`; rendered with the model's chat template."""
    prompt_token_ids: Sequence[int] | None
    sampling: SamplingParams | None
    """The single sampling options, where given too, replace its fields."""
    timeout_s: float | None
    """The whole request's deadline, in seconds, instead of the client's."""
    model: str
    """Default: the one model that the router serves."""
    request_id: str
    """At most 128 printable ASCII characters. Default: made by the router."""
    n: int
    """Outputs of the prompt, each drawn by itself from a seed that follows from `seed`. Default: 1."""
    priority: int | None
    """In [-8, 8]; a smaller number goes first. Default: the tenant's, which usually is 0."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A generate request that is ready to be sent."""

    message: router_pb2.GenerateRequest
    timeout_s: float

    @property
    def n(self) -> int:
        return self.message.n or 1


_INTEGERS = ("top_k", "seed", "min_tokens", "max_tokens", "logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_MAY_BE_NONE = ("seed", "logprobs")
_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))
_OTHER_OPTIONS = frozenset(GenerateOptions.__annotations__) - _SAMPLING_FIELDS


def build_generate(prompt: str | None, options: GenerateOptions, default_timeout_s: float) -> GenerateCall:
    """Raises `RequestError` unless there is exactly one input and every option is known and in range."""
    given: dict[str, Any] = dict(options)
    for name in given.keys() - _SAMPLING_FIELDS - _OTHER_OPTIONS:
        raise RequestError(name, _unknown_option(name))
    sampling_options = {name: given[name] for name in given.keys() & _SAMPLING_FIELDS}
    message = router_pb2.GenerateRequest(
        request_id=_text("request_id", given.get("request_id", "")),
        model=_text("model", given.get("model", "")),
        sampling=_wire.sampling_to_proto(build_sampling(given.get("sampling"), sampling_options)),
        n=_count("n", given.get("n", 1)),
        priority=_priority(given.get("priority")),
    )
    messages, token_ids = given.get("messages"), given.get("prompt_token_ids")
    _check_one_input(prompt=prompt, messages=messages, prompt_token_ids=token_ids)
    if prompt is not None:
        message.prompt = _text("prompt", prompt).encode("utf-8")
    elif messages is not None:
        message.chat.CopyFrom(build_chat(messages))
    else:
        message.prompt_token_ids = _packed(token_ids)
    return GenerateCall(message, check_timeout(given.get("timeout_s"), default_timeout_s))


def build_tokenize(prompt: str | None, messages: Messages | None, model: str) -> router_pb2.TokenizeRequest:
    """Raises `RequestError` unless there is exactly one input."""
    _check_one_input(prompt=prompt, messages=messages)
    message = router_pb2.TokenizeRequest(model=_text("model", model))
    if prompt is not None:
        message.prompt = _text("prompt", prompt).encode("utf-8")
    elif messages is not None:
        message.chat.CopyFrom(build_chat(messages))
    return message


def read_tokens(response: router_pb2.TokenizeResponse) -> tuple[int, ...]:
    return tuple(unpack_tokens(response.token_ids))


def build_sampling(base: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """`base`, or the defaults, with the fields in `options` replaced."""
    if base is not None and not isinstance(base, SamplingParams):
        raise RequestError("sampling", f"must be a SamplingParams, got {type(base).__name__}")
    return replace(base or SamplingParams(), **{name: _sampling_value(name, options[name]) for name in options})


def build_chat(messages: Messages) -> router_pb2.ChatMessages:
    """Checks shape and encoding; which roles a model knows is the router's to say."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError("messages", "must be a list of messages, each with role and content")
    chat = router_pb2.ChatMessages()
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise RequestError(where, f"must have role and content, got {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"{where}.{key}", "is missing")
        chat.messages.add(
            role=_text(f"{where}.role", message["role"]), content=_text(f"{where}.content", message["content"])
        )
    return chat


def check_timeout(timeout_s: float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """`timeout_s`, or the default if it is None. Must be a positive number of at most `MAX_TIMEOUT_S`."""
    if timeout_s is None:
        return default_s
    if not _is_number(timeout_s) or not math.isfinite(timeout_s) or not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        raise RequestError("timeout_s", f"must be in (0, {MAX_TIMEOUT_S:.0f}] seconds, got {timeout_s!r}")
    return float(timeout_s)


def build_scale(replicas: Mapping[str, int], wait_s: float) -> router_pb2.ScaleRequest:
    """Which pools there are, and how large they may be, is the cluster's to say."""
    if not replicas:
        raise RequestError("replicas", "nothing to do: name a pool, as in scale(decode=2)")
    counts = {_text("replicas", pool): _count(pool, count, least=0) for pool, count in replicas.items()}
    return router_pb2.ScaleRequest(replicas=counts, wait_ms=_wait_ms(wait_s))


def build_drain(worker: str, wait_s: float) -> router_pb2.DrainRequest:
    return router_pb2.DrainRequest(worker_id=_text("worker", worker), wait_ms=_wait_ms(wait_s))


def build_flip(worker: str, wait_s: float) -> router_pb2.FlipRequest:
    return router_pb2.FlipRequest(worker_id=_text("worker", worker), wait_ms=_wait_ms(wait_s))


def _wait_ms(wait_s: float) -> int:
    if not _is_number(wait_s) or not 0.0 <= wait_s <= MAX_TIMEOUT_S - ANSWER_MARGIN_S:
        raise RequestError("wait_s", f"must be in [0, {MAX_TIMEOUT_S - ANSWER_MARGIN_S:.0f}] seconds, got {wait_s!r}")
    return math.ceil(1000 * wait_s)


def check_limit(limit: int) -> int:
    """Raises `RequestError` for what the wire cannot carry."""
    if not 1 <= limit < 2**32:
        raise RequestError("limit", f"must be in [1, 2^32), got {limit}")
    return limit


def check_request_id(request_id: str) -> str:
    if not _text("request_id", request_id):
        raise RequestError("request_id", "must not be empty")
    return request_id


def check_address(address: str) -> str:
    """HOST:PORT, IPv6 hosts in brackets; raises `ConfigError` otherwise."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    number = int(port) if port.isascii() and port.isdigit() else 0
    if not host or not colon or bare_ipv6 or "/" in host or not 0 < number < 2**16:
        raise ConfigError(f"router address must be HOST:PORT, such as 127.0.0.1:8600 or [::1]:8600, got {address!r}")
    return address


def channel_options(address: str) -> list[tuple[str, int]]:
    """An HTTP proxy from the environment is no way to one's own machine, but gRPC would take it."""
    host = address.rpartition(":")[0]
    loopback = host in ("localhost", "[::1]") or host.startswith("127.")
    return [("grpc.enable_http_proxy", 0)] if loopback else []


def _check_one_input(**inputs: object) -> None:
    given = [name for name, value in inputs.items() if value is not None]
    if not given:
        raise RequestError(next(iter(inputs)), f"nothing to work on: give one of {', '.join(inputs)}")
    if len(given) > 1:
        raise RequestError(given[1], f"only one input can be given, got {' and '.join(given)}")


def _sampling_value(name: str, value: Any) -> Any:
    if value is None and name in _MAY_BE_NONE:
        return None
    if name in _INTEGERS and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise RequestError(name, f"must be an integer, got {reprlib.repr(value)}")
    if name in _NUMBERS and not _is_number(value):
        raise RequestError(name, f"must be a number, got {reprlib.repr(value)}")
    if name == "ignore_eos" and not isinstance(value, bool):
        raise RequestError(name, f"must be True or False, got {reprlib.repr(value)}")
    if name == "stop":
        return _stop_strings(value)
    if name == "stop_token_ids":
        return check_token_ids(name, value, MAX_STOP_TOKEN_IDS)
    if name == "logit_bias":
        return _biases(value)
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """By token id. Of more than may be given none is looked at."""
    if isinstance(value, (Mapping, Sequence)) and len(value) > MAX_BIASED_TOKENS:
        raise RequestError("logit_bias", f"at most {MAX_BIASED_TOKENS} tokens, got {len(value)}")
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if isinstance(pairs, str) or not isinstance(pairs, Sequence) or not all(_is_bias(pair) for pair in pairs):
        raise RequestError("logit_bias", f"must give a number for each token id, got {reprlib.repr(value)}")
    return tuple(sorted((int(token_id), float(bias)) for token_id, bias in pairs))


def _is_bias(pair: Any) -> bool:
    match pair:
        case (token_id, bias):
            return isinstance(token_id, Integral) and not isinstance(token_id, bool) and _is_number(bias)
    return False


def _stop_strings(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if isinstance(values, Sequence) and len(values) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(values)}")
    if not isinstance(values, Sequence) or not all(isinstance(text, str) for text in values):
        raise RequestError("stop", f"must be a string or a list of strings, got {reprlib.repr(value)}")
    return tuple(values)


def check_token_ids(name: str, value: Any, limit: int) -> tuple[int, ...]:
    """At most `limit` integers; of a longer list none is looked at."""
    if isinstance(value, Sequence) and len(value) > limit:
        raise RequestError(name, f"at most {limit}, got {len(value)}")
    whole = isinstance(value, Sequence) and all(isinstance(i, Integral) and not isinstance(i, bool) for i in value)
    if not whole:
        raise RequestError(name, f"must be a list of integers, got {reprlib.repr(value)}")
    return tuple(int(i) for i in value)


def _packed(token_ids: Any) -> bytes:
    if isinstance(token_ids, (bytes, bytearray, str)):  # the first two would be read as packed ids
        raise RequestError("prompt_token_ids", f"must be a list of integers, got {type(token_ids).__name__}")
    return pack_tokens(token_ids)


def _count(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= _wire.MAX_U32:
        raise RequestError(name, f"must be an integer of at least {least}, got {value!r}")
    return int(value)


def _priority(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError("priority", f"must be an integer, got {value!r}")
    check_priority(int(value))
    return int(value)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(field, f"must be text, got {type(value).__name__}")
    _wire.check_utf8(field, value)
    return value


def _unknown_option(name: str) -> str:
    near = difflib.get_close_matches(name, _SAMPLING_FIELDS | _OTHER_OPTIONS, n=1)
    return f"no such option; did you mean {near[0]}?" if near else "no such option"
