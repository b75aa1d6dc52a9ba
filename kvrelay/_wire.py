"""Between wire messages and the few values that both ends of a call use. Knows no channel and no policy.

Imports neither torch nor the engine's own types: logprobs travel as plain numbers, finish reasons as their names.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import InternalError, RequestError
from engine.sampling_params import SamplingParams
from kvrelay.v1 import common_pb2

PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1
"""Oldest protocol that we still speak: a peer may be one version behind."""

SESSION_TOKEN_KEY = "kvrelay-session-token"
"""Metadata of a session: `ClusterKey.session_token` of the router."""

MAX_U32 = 2**32 - 1

SAMPLING_FIELDS: tuple[str, ...] = tuple(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
"""What a worker of this version acts upon, as it says in its welcome."""
FIRST_SAMPLING_FIELDS = frozenset(SAMPLING_FIELDS[: SAMPLING_FIELDS.index("ignore_eos") + 1])
"""What any worker acts upon. An older one would ignore the others, and draw other tokens than were asked for."""

_OPTIONAL_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "min_tokens",
    "max_tokens",
    "logprobs",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)

_DEFAULTS = SamplingParams()

_FINISH_REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_REASON_NAMES = {number: name for name, number in _FINISH_REASONS.items()}


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field is written, defaults too: what is sent does not depend on the receiver's defaults.

    `seed` and `logprobs` stay absent if they are None. Raises `RequestError` for what the wire cannot carry.
    """
    for field in ("min_tokens", "max_tokens"):
        _check_u32(field, getattr(params, field))
    for token_id in params.stop_token_ids:
        _check_u32("stop_token_ids", token_id)
    for token_id, _ in params.logit_bias:
        _check_u32("logit_bias", token_id)
    for text in params.stop:
        check_utf8("stop", text)
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        logprobs=params.logprobs,
        ignore_eos=params.ignore_eos,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
    )


def later_fields(params: SamplingParams) -> frozenset[str]:
    """The fields that `params` uses and that an older worker may not know."""
    names = (name for name in SAMPLING_FIELDS if name not in FIRST_SAMPLING_FIELDS)
    return frozenset(name for name in names if getattr(params, name) != getattr(_DEFAULTS, name))


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take the defaults of `SamplingParams`; values out of range raise `RequestError`."""
    present = {field.name for field, _ in message.ListFields()}
    given = {name: getattr(message, name) for name in _OPTIONAL_SAMPLING_FIELDS if name in present}
    return SamplingParams(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        **given,
    )


def finish_reason_to_proto(name: str | None) -> common_pb2.FinishReason.ValueType:
    """`name` is "stop" or "length" in either case (an enum's name will do), or None while a request goes on."""
    if name is None:
        return common_pb2.FINISH_REASON_UNSPECIFIED
    number = _FINISH_REASONS.get(name.lower())
    if number is None:
        raise InternalError(f"finish reason {name!r} is none of {sorted(_FINISH_REASONS)}")
    return number


def finish_reason_from_proto(number: common_pb2.FinishReason.ValueType) -> str | None:
    """ "stop", "length", or None for UNSPECIFIED. A value of a newer peer raises `InternalError`."""
    if number == common_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    name = _FINISH_REASON_NAMES.get(number)
    if name is None:
        raise InternalError(f"finish reason {number} is unknown here: the peer speaks a newer protocol")
    return name


def logprobs_to_proto(logprob: float, top: Iterable[tuple[int, float]]) -> common_pb2.TokenLogprobs:
    """`logprob` is the sampled token's; `top` are (token id, logprob) pairs, best first."""
    return common_pb2.TokenLogprobs(
        logprob=logprob,
        top=[common_pb2.TopLogprob(token_id=token_id, logprob=value) for token_id, value in top],
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> tuple[float, tuple[tuple[int, float], ...]]:
    """(logprob of the sampled token, ((token id, logprob), ...) best first). Values are float32 on the wire."""
    return message.logprob, tuple((entry.token_id, entry.logprob) for entry in message.top)


def check_utf8(field: str, text: str) -> None:
    """Raise `RequestError` if `text` holds half a surrogate pair: no UTF-8 text can."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(field, f"no valid UTF-8: lone surrogate at character {error.start}") from None


def _check_u32(field: str, value: int) -> None:
    if not 0 <= value <= MAX_U32:
        raise RequestError(field, f"must be below 2^32, got {value}")
