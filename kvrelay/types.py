"""What the clients return: frozen values, each made from one wire message. Knows no channel.

Names and units are those of `proto/kvrelay/v1/router.proto`, where every field is described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypedDict, cast

from engine.block_hash import unpack_tokens
from engine.errors import InternalError
from kvrelay import _wire
from kvrelay.v1 import common_pb2, router_pb2

FinishReason = Literal["stop", "length"]
"""A stop string, stop token or end-of-sequence token; or `max_tokens` reached."""


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    """ "system", "user" or "assistant"."""
    content: str


Messages = Sequence[ChatMessage] | Sequence[Mapping[str, str]]
"""A conversation, oldest message first."""


class TopLogprob(NamedTuple):
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the model's own probabilities, before temperature, top-k and top-p."""

    logprob: float
    """Of the token that was sampled."""
    top: tuple[TopLogprob, ...]
    """The most likely tokens, best first; as many as were asked for."""

    @classmethod
    def from_proto(cls, message: common_pb2.TokenLogprobs) -> Self:
        logprob, top = _wire.logprobs_from_proto(message)
        return cls(logprob, tuple(TopLogprob(*entry) for entry in top))


@dataclass(frozen=True, slots=True)
class Chunk:
    """What arrived at once. The texts of all chunks of a choice, in order, are its text."""

    index: int
    """Output index of the first token here, from 0."""
    token_ids: tuple[int, ...]
    """Empty only in a last chunk that brings text which was held back."""
    text: str
    """Text that became final; empty while it may still be part of a character or of a stop string."""
    logprobs: tuple[TokenLogprobs, ...]
    """One a token where asked for, else empty."""
    choice: int = 0
    """Of which output, where `n` asked for several. The chunks of several come mixed."""

    @classmethod
    def from_proto(cls, message: router_pb2.Tokens) -> Self:
        logprobs = tuple(TokenLogprobs.from_proto(entry) for entry in message.logprobs)
        return cls(message.index, tuple(unpack_tokens(message.token_ids)), message.text, logprobs, message.choice)


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found in a prefix cache, wherever."""

    @classmethod
    def from_proto(cls, message: router_pb2.Usage) -> Self:
        return cls(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request ran, and what moved. Of the last attempt, where there were several."""

    prefill_worker: str
    """Empty: the decode worker computed the prompt itself."""
    decode_worker: str
    attempts: int
    blocks_computed: int
    blocks_sent: int
    blocks_adopted: int
    """Verified and registered by the decode worker."""
    blocks_cached: int
    """Already resident at the decode worker: not sent."""
    bytes_sent: int
    recomputed_tokens: int
    """Prompt tokens that the decode worker computed although a prefill worker was asked."""
    transport: str
    transfer_us: int = 0
    """First byte of the first block to the adoption of the last one."""
    transfer_error: str = ""
    """Why KV did not come, where it was asked for."""
    prefill_cached_tokens: int = 0
    """That the prefill worker found in its own prefix cache."""
    decode_cached_tokens: int = 0

    @classmethod
    def from_proto(cls, message: router_pb2.Route) -> Self:
        return cls(**{name: getattr(message, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    duration_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Where the time went. `parts` add up to `ttft_us`."""

    parts: tuple[Span, ...]
    ttft_us: int
    """From the router's receipt of the request to the first token's way out."""
    after_first: tuple[Span, ...]
    second_token_us: int
    """From the first token to the second; 0 if there was only one."""
    decode_tokens_per_s: float
    """Tokens after the first, over the time since the first; 0 if there was only one."""
    handed_over_us: int = 0
    """From receipt to the decode worker's account of the KV; 0 if it gave none."""

    @classmethod
    def from_proto(cls, message: router_pb2.Waterfall) -> Self:
        return cls(
            parts=tuple(Span(part.name, part.duration_us) for part in message.parts),
            ttft_us=message.ttft_us,
            after_first=tuple(Span(part.name, part.duration_us) for part in message.after_first),
            second_token_us=message.second_token_us,
            decode_tokens_per_s=message.decode_tokens_per_s,
            handed_over_us=message.handed_over_us,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished answer; with `n` > 1, the first of them. `usage` is its own: all of them used the prompt once."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...]
    """One a token where asked for, else empty."""
    route: Route
    waterfall: Waterfall
    further: tuple[Generation, ...] = ()
    """Choices 1 to n - 1, where `n` asked for several."""

    @property
    def choices(self) -> tuple[Generation, ...]:
        """All outputs of the call, this one first."""
        return (self, *self.further)


@dataclass(frozen=True, slots=True)
class ModelCard:
    name: str
    max_model_len: int
    """Prompt and output together, in tokens."""
    fingerprint: bytes
    """Of configuration, tokenizer and weights."""

    @classmethod
    def from_proto(cls, message: router_pb2.ModelCard) -> Self:
        return cls(message.name, message.max_model_len, message.fingerprint)


@dataclass(frozen=True, slots=True)
class PriceTerm:
    name: str
    ms: float
    """Estimated."""
    actual_ms: float | None = None
    """What came of it, where that was measured."""

    @classmethod
    def from_proto(cls, message: router_pb2.PriceTerm) -> Self:
        return cls(message.name, message.ms, message.actual_ms if message.HasField("actual_ms") else None)


@dataclass(frozen=True, slots=True)
class PricedPair:
    """One candidate of a placement. `terms` add up to `total_ms`."""

    prefill_worker: str
    """Empty: the decode worker computes the prompt itself."""
    decode_worker: str
    total_ms: float
    terms: tuple[PriceTerm, ...]
    affinity_ms: float = 0.0
    """What it may cost more than a pair that holds nothing of the prompt."""
    cached_tokens: int = 0
    """That the worker which computes the prompt was believed to hold."""
    found_cached_tokens: int | None = None
    """That it turned out to hold, where that is known."""

    @classmethod
    def from_proto(cls, message: router_pb2.PricedPair) -> Self:
        return cls(
            prefill_worker=message.prefill_worker,
            decode_worker=message.decode_worker,
            total_ms=message.total_ms,
            terms=tuple(PriceTerm.from_proto(term) for term in message.terms),
            affinity_ms=message.affinity_ms,
            cached_tokens=message.cached_tokens,
            found_cached_tokens=message.found_cached_tokens if message.HasField("found_cached_tokens") else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """How a recent request was placed, and what happened then."""

    request_id: str
    considered: tuple[PricedPair, ...]
    """The first one was chosen. Best first, by price less affinity."""
    route: Route
    waterfall: Waterfall
    outcome: str
    """ "running", a finish reason, or a gRPC status name with its message."""

    @classmethod
    def from_proto(cls, message: router_pb2.ExplainResponse) -> Self:
        return cls(
            request_id=message.request_id,
            considered=tuple(PricedPair.from_proto(pair) for pair in message.considered),
            route=Route.from_proto(message.route),
            waterfall=Waterfall.from_proto(message.waterfall),
            outcome=message.outcome,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    worker_id: str
    incarnation: str
    role: str
    """ "prefill" or "decode"."""
    address: str
    state: str
    """ "connecting", "ready" or "lost"."""
    detail: str
    """Why it is not ready."""
    pid: int
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_leased: int
    blocks_quarantined: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    resident_bytes: int
    errors: dict[str, int]
    """Counted typed errors, by class name."""
    blocks_state: str
    """ "asked", "listing" or "live"; empty if it does not tell what it holds."""
    blocks_staleness_s: float
    """How old what the router has noted of its blocks may be."""
    blocks_lists: int
    """Asked for in this session. More than one: changes were lost or differed."""
    blocks_noted: int
    """Routing keys that the router has noted for it, those evicted since included."""
    blocks_digest: int
    """Their sum, modulo 2^64."""
    device: str
    """ "cpu", or a GPU and which card that is, in the worker's words."""
    kernels: str
    """What computes there."""

    @classmethod
    def from_proto(cls, message: router_pb2.WorkerStatus) -> Self:
        return cls(
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            role=message.role,
            address=message.address,
            state=message.state,
            detail=message.detail,
            pid=message.pid,
            running=message.running,
            waiting=message.waiting,
            blocks_total=message.blocks_total,
            blocks_free=message.blocks_free,
            blocks_cached=message.blocks_cached,
            blocks_owned=message.blocks_owned,
            blocks_leased=message.blocks_leased,
            blocks_quarantined=message.blocks_quarantined,
            prefill_tokens_per_s=message.prefill_tokens_per_s,
            decode_step_ms=message.decode_step_ms,
            resident_bytes=message.resident_bytes,
            errors=dict(message.errors),
            blocks_state=message.blocks_state,
            blocks_staleness_s=message.blocks_staleness_s,
            blocks_lists=message.blocks_lists,
            blocks_noted=message.blocks_noted,
            blocks_digest=message.blocks_digest,
            device=message.device,
            kernels=message.kernels,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixIndexStatus:
    """What a router has noted of the blocks that are resident at its workers."""

    keys: int
    speculative_keys: int
    num_bytes: int
    max_bytes: int
    evictions: int

    @classmethod
    def from_proto(cls, message: router_pb2.PrefixIndexStatus) -> Self:
        return cls(
            keys=message.keys,
            speculative_keys=message.speculative_keys,
            num_bytes=message.num_bytes,
            max_bytes=message.max_bytes,
            evictions=message.evictions,
        )


@dataclass(frozen=True, slots=True)
class TermError:
    """How far estimates of one term of a price were from what happened."""

    name: str
    count: int
    mean_ms: float
    """Of estimate less actual."""
    mean_abs_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """One router's view of the workers."""

    router_id: str
    version: str
    uptime_ms: int
    workers: tuple[WorkerStatus, ...]
    live_requests: int
    requests_total: int
    requests_failed: int
    requests_cancelled: int
    """By their client."""
    requests_refused: int
    """They could never be served."""
    prefix_index: PrefixIndexStatus
    term_errors: tuple[TermError, ...]

    @classmethod
    def from_proto(cls, message: router_pb2.StatusResponse) -> Self:
        return cls(
            router_id=message.router_id,
            version=message.version,
            uptime_ms=message.uptime_ms,
            workers=tuple(WorkerStatus.from_proto(worker) for worker in message.workers),
            live_requests=message.live_requests,
            requests_total=message.requests_total,
            requests_failed=message.requests_failed,
            requests_cancelled=message.requests_cancelled,
            requests_refused=message.requests_refused,
            prefix_index=PrefixIndexStatus.from_proto(message.prefix_index),
            term_errors=tuple(
                TermError(error.name, error.count, error.mean_ms, error.mean_abs_ms) for error in message.term_errors
            ),
        )


def finish_reason_of(message: router_pb2.Finished) -> FinishReason:
    """Raises `InternalError` if the message gives none: a request that finished has a reason."""
    name = _wire.finish_reason_from_proto(message.reason)
    if name is None:
        raise InternalError("the router ended a stream without a finish reason")
    return cast(FinishReason, name)
