"""One request's tokens, blocks and status, and the rules for its end. Knows neither queues nor the pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.adoption import Adoption
from engine.errors import InternalError, RequestError
from engine.priority import check_priority
from engine.routing_key import RunningRoutingKey
from engine.sampling_params import MAX_LOGPROBS, SamplingParams


class RequestKind(Enum):
    LOCAL = "local"
    """Compute the prompt here and decode."""
    PREFILL = "prefill"
    """Compute the prompt, draw one token, then keep the blocks until the transfer has read them."""
    DECODE = "decode"
    """The prompt's KV arrives over a link; then decode."""


class RequestStatus(Enum):
    WAITING = "waiting"
    """In the queue for blocks and a turn. Holds no block."""
    AWAITING_KV = "awaiting_kv"
    """Blocks reserved; a link writes into them. Never preempted."""
    RUNNING = "running"
    """Has tokens to compute and blocks to compute them in."""
    HELD = "held"
    """Computes no more; its blocks stay because a link may still touch them."""
    FINISHED = "finished"
    """Holds nothing."""


_LEGAL_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.AWAITING_KV, RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.AWAITING_KV: frozenset({RequestStatus.RUNNING, RequestStatus.HELD, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.WAITING, RequestStatus.HELD, RequestStatus.FINISHED}),
    RequestStatus.HELD: frozenset({RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


_WILL_DRAW = (RequestStatus.WAITING, RequestStatus.AWAITING_KV, RequestStatus.RUNNING)


class FinishReason(Enum):
    STOP = "stop"
    """An end-of-sequence token or a stop token. (Stop strings are seen where text is made.)"""
    LENGTH = "length"
    """`max_tokens` reached."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Everything the engine knows of a request. Read by anyone on the engine thread.

    Writers: the caller before it hands the request over; then `BlockTables` for blocks and hashes, `Scheduler` for
    status and adoption, `Engine` for tokens.

    Invariant: `num_computed_tokens <= len(token_ids)`, and the KV of those tokens is in the blocks of `block_table`.
    The rest is still to be computed; that is all there is to prefill, decode, resume and recompute.

    Raises `RequestError` for an empty prompt, or a number out of range.
    """

    request_id: str
    token_ids: list[int]
    """Prompt, then output. Owned by the request from here on, and grows."""
    num_prompt_tokens: int
    """Of the original prompt: a resumed request brings tokens that were already emitted, which count as output."""
    params: SamplingParams
    scope: bytes
    """Tenant scope, part of block identity."""
    arrival: float
    """Monotonic seconds. For the waterfall, and for how long it waits; the queue number decides who came first."""
    kind: RequestKind = RequestKind.LOCAL
    priority: int = 0
    """A smaller number goes first; in [-8, 8]."""
    num_public_tokens: int = 0
    """Leading tokens of the prompt that are public: full blocks of nothing else are shared by all scopes."""
    prompt_logprobs: int | None = None
    """N >= 0: logprobs of the prompt's tokens but the first, and of the N most likely in the place of each. The prompt
    is then computed whole, whatever is cached of it. Not for DECODE, whose prompt is not computed."""

    num_prompt_logprobs: int = field(default=0, init=False)
    """Prompt tokens whose logprobs were told."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    queue_number: int = field(default=0, init=False)
    """Order of acceptance; the smallest is the oldest. Preemption does not change it."""
    level: int = field(default=0, init=False)
    """Priority with which it was admitted: its own, or a better one if it had to wait long."""
    block_table: list[int] = field(default_factory=list, init=False)
    """Blocks that hold the KV of tokens 0, 1, ... in order; the last may be empty still (room to grow).

    The first `num_released_blocks` stand for blocks that left the sliding window and were given back.
    """
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    """Content hashes of the full blocks of `token_ids`, as far as they were needed."""
    block_names: list[bytes] = field(default_factory=list, init=False)
    """Names of the full blocks in block events, as far as they were needed."""
    routing_key: RunningRoutingKey | None = field(default=None, init=False, repr=False)
    """Of the blocks in `block_names`, if those are routing keys."""
    num_released_blocks: int = field(default=0, init=False)
    num_published_blocks: int = field(default=0, init=False)
    """Leading blocks of `block_table` that other requests can find by hash."""
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache at first admission."""
    num_recomputed_tokens: int = field(default=0, init=False)
    """DECODE: tokens of the reservation that are computed here because their KV did not come over the link."""
    num_preemptions: int = field(default=0, init=False)
    first_scheduled: float | None = field(default=None, init=False)
    """Engine clock at the first step that computed for this request."""
    adoption: Adoption | None = field(default=None, init=False)
    """DECODE, until it runs: which KV and what else it waits for."""
    transfer_over: bool = field(default=False, init=False)
    """PREFILL: no link reads its blocks (any more), so they need not be held."""
    samples: list[Request] = field(default_factory=list, init=False, repr=False)
    """Requests with the same tokens, which draw along at this one's next draw and go their own way from there."""
    sample_of: Request | None = field(default=None, init=False, repr=False)
    """The request in whose `samples` this one is."""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise RequestError("prompt_token_ids", "must have at least 1 token, got 0")
        if not 1 <= self.num_prompt_tokens <= len(self.token_ids):
            raise RequestError(
                "num_prompt_tokens",
                f"must be in [1, {len(self.token_ids)}] (the tokens given), got {self.num_prompt_tokens}",
            )
        if not 0 <= self.num_public_tokens <= self.num_prompt_tokens:
            raise RequestError(
                "num_public_tokens",
                f"must be in [0, {self.num_prompt_tokens}] (the prompt's), got {self.num_public_tokens}",
            )
        check_priority(self.priority)
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise RequestError("prompt_logprobs", f"must be in [0, {MAX_LOGPROBS}], got {self.prompt_logprobs}")
        if self.prompt_logprobs is not None and self.kind is RequestKind.DECODE:
            raise RequestError("prompt_logprobs", "are the prefill worker's to tell, got a DECODE request")

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn for this request anywhere, those before a resume included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def needs_prompt_logits(self) -> bool:
        return self.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def untold_positions(self, num_tokens: int) -> range:
        """Of the next `num_tokens` to be computed, those whose logits are of a prompt token that was not told yet."""
        if not self.needs_prompt_logits:
            return range(0)
        end = min(self.num_computed_tokens + num_tokens, self.num_prompt_tokens - 1)
        return range(max(self.num_computed_tokens, self.num_prompt_logprobs), end)

    @property
    def kv_will_come(self) -> bool:
        """From a link, as long as nobody gives that up."""
        return self.adoption is not None and not self.adoption.given_up

    @property
    def draws_along(self) -> bool:
        """Whether it waits for another request's next draw, and needs neither blocks nor a turn until then."""
        return self.sample_of is not None and self.sample_of.status in _WILL_DRAW

    @property
    def drawing_along(self) -> list[Request]:
        """Those of `samples` that have its tokens still."""
        return [r for r in self.samples if r.status is RequestStatus.WAITING and r.token_ids == self.token_ids]

    @property
    def max_kv_tokens(self) -> int:
        """Tokens whose KV this request ever holds here, at worst. The last token drawn needs none."""
        if self.kind is RequestKind.PREFILL:
            return len(self.token_ids)
        return self.num_prompt_tokens + self.params.max_tokens - 1

    def transition(self, status: RequestStatus) -> None:
        """The only writer of `status`. Raises `InternalError` on an illegal change, which then has not happened."""
        if status not in _LEGAL_TRANSITIONS[self.status]:
            raise InternalError(f"request {self.request_id}: {self.status.value} cannot become {status.value}")
        self.status = status

    def banned_token_ids(self, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens that the next draw must not give: whatever would stop the output before `min_tokens`."""
        if self.num_output_tokens >= self.params.min_tokens:
            return ()
        return (*eos_token_ids, *self.params.stop_token_ids)

    def finish_reason(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Whether the last token, just drawn, ends the output."""
        token_id = self.token_ids[-1]
        if token_id in self.params.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and not self.params.ignore_eos:
            return FinishReason.STOP
        if self.num_output_tokens >= self.params.max_tokens:
            return FinishReason.LENGTH
        return None
